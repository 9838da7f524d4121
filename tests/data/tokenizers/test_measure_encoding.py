"""The program that measures how fast tokenizers encode, on a small text. It also compares the tokens."""

from pathlib import Path

import pytest

from tests.data.tokenizers.measure_encoding import SENTENCEPIECE, main


def test_each_tokenizer_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("It was the best of times, it was the worst of times.\n" * 50)
    main([str(tmp_path / "text"), "--megabytes", "0.05", "--vocab_size", "500", "--rounds", "1"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [[kind, text] for kind in SENTENCEPIECE
                                             for text in ("Python source", "text")]
    assert all(float(cell) > 0 for row in rows[1:] for cell in row[2:] if cell)
