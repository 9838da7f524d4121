"""Text of foreign documents sends no controls to the terminal."""

import subprocess
import sys
from pathlib import Path

from tests.support.launch import PROGRAM
from tests.terminal.test_streams import check_output, foreign  # noqa: F401 (a fixture)


def test_text_of_documents_sends_nothing_to_the_terminal(foreign: Path) -> None:  # noqa: F811
    prepare = [sys.executable, PROGRAM, "prepare", f"{foreign}/text.jsonl", "--tokenizer", "bytes", "--out",
               f"{foreign}/text"]
    assert subprocess.run(prepare, capture_output=True).returncode == 0
    check_output("inspect {folder}/text --tokenizer bytes", foreign)
