"""Programs that show run folders."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pretrain.extensions.report.main import page_html, write_page
from pretrain.extensions.report.page_data import ShownRun, page_data
from tests.support.browser import Browser, Page
from tests.support.launch import PROGRAM, ROOT

DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"  # the page has been drawn


@contextlib.contextmanager
def watching(*runs: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `ds-pretrain report --watch`, and give its process and its address."""
    process = subprocess.Popen([sys.executable, PROGRAM, "report", *map(str, runs), "--watch"], text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split(" ")[0]
    finally:
        process.kill()
        process.wait()


def open_report(browser: Browser, folder: Path, *runs: Path) -> Page:
    """Write the page of the runs, and open it from its file."""
    write_page(page_html(page_data([ShownRun(run) for run in runs], watch=False)), folder / "report.html")
    page = browser.page((folder / "report.html").as_uri())
    page.wait_for("window.report && report.charts.every((chart) => chart.series)")
    page.run(DRAWN)
    return page
