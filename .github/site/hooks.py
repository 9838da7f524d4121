"""Hooks of mkdocs: the site's pages are the Markdown files where they are in the repository, and the reference."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pretrain.commands.reference import TOPICS

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("", ".github", "ds_configs", "launch/**", "pretrain/**", "tests", "tools/**")
_LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")
_COMMAND = re.compile(r"(?<!\[)`ds-pretrain reference ([\w-]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files of the repository that they link, such as scripts and pictures."""
    pages = [page for folder in _FOLDERS for page in ROOT.glob(os.path.join(folder, "*.md"))]
    linked = {(page.parent / target).resolve() for page in pages
              for target in _LINK.findall(page.read_text(encoding="utf-8"))}
    for path in sorted({*pages, *filter(Path.is_file, linked)}):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    for topic, (title, text) in TOPICS.items():
        files.append(File.generated(config, f"reference/{topic}.md", content=f"# {title}\n\n{text()}"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the commands that print a part of the reference to its page."""
    folder = os.path.relpath("reference", os.path.dirname(page.file.src_uri))
    return _COMMAND.sub(lambda command: f"[{command[0]}]({folder}/{command[1]}.md)", markdown)
