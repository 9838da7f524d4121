"""Text of a foreign run sends no controls to the terminal, nor into the page."""

from pathlib import Path

import pytest

from tests.terminal.test_streams import ACTING, check_output, foreign  # noqa: F401 (a fixture)


@pytest.mark.parametrize("command", ["--compare {run} {named}", "--command {run}", "{run} --output {folder}/page.html"])
def test_text_of_a_run_sends_nothing_to_the_terminal(command: str, foreign: Path) -> None:  # noqa: F811
    piped = check_output(f"report {command}", foreign)
    if "--compare" in command:
        assert r"<\x1b]0;title\x07\x1b[2J\x9b31m" in piped
    if "--output" in command:
        assert not ACTING.search((foreign / "page.html").read_text())
