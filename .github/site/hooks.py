"""Hooks of mkdocs: the site's pages are the Markdown files where they are in the repository."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("", ".github", "ds_configs", "launch", "pretrain", "tests", "tools")
_LINK = re.compile(r"\]\(([^)#:]+)[^):]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files of the repository that they link, such as scripts and pictures."""
    pages = [page for folder in _FOLDERS for page in (ROOT / folder).glob("*.md")]
    linked = {(page.parent / target).resolve() for page in pages
              for target in _LINK.findall(page.read_text(encoding="utf-8"))}
    for path in sorted({*pages, *filter(Path.is_file, linked)}):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    return files
