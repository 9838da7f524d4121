"""The documentation as a site: it builds without warnings, and its search works from the disk, without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.launch import ROOT
from tests.support.pages import PAGES


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A page that is not in `nav`, a broken link and a missing anchor are errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([Path(sys.executable).parent / "mkdocs", "build", "--strict", "-f",  # --quiet: never strict
                           ROOT / ".github/site/mkdocs.yml", "-d", folder], capture_output=True, text=True, cwd=folder,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})  # of the theme, about another program
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    return folder


def test_the_site_has_every_page_and_names_no_other_host(site: Path) -> None:
    for page in PAGES:
        built = site / page.relative_to(ROOT).with_suffix(".html")
        html = (built.with_name("index.html") if page.stem == "README" else built).read_text(encoding="utf-8")
        assert re.search(r"<h1[ >]", html), page
        assert re.findall(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=.?(?:https?:)?//[^>]*", html) == []


def test_the_search_finds_a_section_without_a_server(site: Path, tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    try:
        page = browser.page(f"file://{site}/index.html")
        page.run("""(() => {
            const query = document.querySelector("[data-md-component=search-query]");
            query.focus();
            query.value = "--spike_policy";
            query.dispatchEvent(new Event("keyup", {bubbles: true}));
        })()""")
        page.wait_for("document.querySelector('.md-search-result__link') !== null")
        links = page.run("[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)")
        assert any("pages/right_results.html" in link and "#bad-steps-and-spikes" in link for link in links), links
        assert page.errors() == []
        assert [url for url in page.requests() if not url.startswith("file://")] == []
    finally:
        browser.close()
