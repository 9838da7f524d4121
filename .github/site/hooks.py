"""Hooks of mkdocs: the site's pages are the Markdown files where they are in the repository, and the reference."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pretrain.commands.reference import TOPICS

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("", ".github", "pretrain/**", "tests", "tools/**")
_LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")
_COMMAND = re.compile(r"(?<!\[)`ds-pretrain reference ([\w-]+)`")
_TO_PAGE = re.compile(r"\[([^\]]*)\]\(([^)#:]+\.md)[^)]*\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of extensions and of the reference to the navigation: a folder can be deleted without an edit."""
    sections = {title: pages for each in config.nav or [] for title, pages in each.items()}
    listed = {page for pages in sections.values() for page in pages}
    others = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("pretrain/pages/*.md"))
    sections["Reference"] += [page for page in others if page not in listed]
    sections["Reference"] += [f"reference/{topic}.md" for topic in TOPICS]
    for readme in sorted(ROOT.glob("pretrain/extensions/*/README.md")):
        title = readme.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        others = sorted(page for page in readme.parent.rglob("*.md") if page != readme)
        pages = [str(page.relative_to(ROOT)) for page in (readme, *others)]
        sections["Extensions"].append({title: pages} if others else pages[0])
    return config


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
    """Link commands that print a part of the reference to its page, and no page of an extension that was deleted."""
    def linked(link: re.Match[str]) -> str:
        target = (ROOT / page.file.src_uri).parent.joinpath(link[2]).resolve()
        return link[1] if target.is_relative_to(ROOT / "pretrain/extensions") and not target.exists() else link[0]

    markdown = _TO_PAGE.sub(linked, markdown)
    folder = os.path.relpath("reference", os.path.dirname(page.file.src_uri))
    return _COMMAND.sub(lambda command: f"[{command[0]}]({folder}/{command[1]}.md)" if command[1] in TOPICS
                        else command[0], markdown)
