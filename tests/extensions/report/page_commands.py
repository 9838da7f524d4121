"""A check of the page of real runs: see tests/test_quickstart.py."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.monitor.read_run_folder import newest_path, read_metrics
from tests.support.browser import Browser


def check_guide(clone: Path, run_command: Callable[[str], Any], folder: Path) -> None:
    """Open the page of two runs in a browser: one with pipeline stages, one resumed in another layout."""
    browser = Browser(folder / "profile")
    try:
        runs = [clone / "runs" / name for name in ("quickstart", "first")]
        done = run_command(shlex.join(["ds-pretrain", "report", *map(str, runs), "--output",
                                       str(folder / "report.html")]))
        assert done.returncode == 0, done.stderr
        page = browser.page((folder / "report.html").as_uri())
        page.wait_for("window.report && report.charts.every((chart) => chart.series)")
        for index, run in enumerate(runs):
            rows = newest_path([row for row in read_metrics(run) if "loss" in row])
            for key in ("step", "loss", "grad_norm", "forward_time_ms", "goodput"):
                assert page.run(f"report.data.runs[{index}].training.values.{key}") == [row[key] for row in rows]
        shown = page.run("document.getElementById('events').textContent")
        assert "global_step" in shown
        assert page.errors() == []
    finally:
        browser.close()
