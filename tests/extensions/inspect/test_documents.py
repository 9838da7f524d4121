"""Damaged, duplicate and degenerate documents, and the page about them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data.prepare.prepare import prepare
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter, write_index
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.extensions.inspect.documents import DocumentReport, inspect_documents, report_lines, write_page
from tests.wrong_inputs.case import main_of

EOD = 0
NORMAL = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("Some text with <markup> & more. Other text.\n" * 50)
    return str(train_sentencepiece([str(folder / "text.txt")], folder, vocab_size=300).path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """40 documents of random tokens, then one of each kind."""
    prefix, random = tmp_path_factory.mktemp("documents") / "data", np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        normal = [[*random.integers(1, 500, 100).tolist(), EOD] for _ in range(NORMAL)]
        for tokens in [*normal, [1, 2, 600, EOD], [1, 2, 3], [4, EOD, 5, EOD], [EOD], [], [7, EOD],
                       [8, 9] * 500 + [EOD], normal[3]]:
            writer.add_document(tokens)
        writer.finalize()
    return IndexedDataset(prefix)


def report_of(data: IndexedDataset, **settings: Any) -> DocumentReport:
    return inspect_documents(data, **{"vocab_size": 500, "eod_token": EOD, "most": 1000,
                                      "advance": lambda *_: None, **settings})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `ds-pretrain inspect` in this process, and returns its exit code and output."""
    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["inspect", *map(str, words)])
        return main_of("inspect")(), "".join(capsys.readouterr())
    return call


def test_each_kind_is_found(data: IndexedDataset) -> None:
    advanced: list[int] = []
    report = report_of(data, advance=lambda number, _: advanced.append(number))
    found = {kind: numbers for kind, numbers in report.examples.items() if numbers}
    assert found == {"damaged": [40], "no end": [41, 44], "inner end": [42], "empty": [43, 44], "one token": [45],
                     "degenerate": [46], "duplicate": [47]}
    assert report.counts == {kind: len(report.examples[kind]) for kind in report.examples}
    assert sum(advanced) == 2 * data.num_tokens
    assert report.tokens == data.num_tokens == report.token_counts.sum()
    assert report.longest == (1001, 46)
    assert report.lengths[:11].tolist() == [1, 1, 1 + 1, 1 + 1, 0, 0, 0, NORMAL + 1, 0, 0, 1]
    some = report_of(data, vocab_size=None, eod_token=None, most=12)
    assert some.lengths.sum() == some.inspected == 12
    assert "(12 of them inspected)" in report_lines(some)[0]
    assert "damaged" not in "".join(report_lines(some))


def test_data_without_end_tokens_and_tokens_that_no_vocabulary_has(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for start in range(20):
            writer.add_document(range(start + 1, start + 90))
        writer.finalize()
    lines = report_lines(report_of(IndexedDataset(tmp_path / "data")))
    assert lines[1:] == ["no damaged, duplicate or degenerate document"], "it is not reported as incomplete"
    np.array([1, 2, 3 << 40, 4], "<i8").tofile(tmp_path / "wide.bin")
    np.array([2, 2], "<i4").tofile(tmp_path / "lengths")
    write_index(tmp_path / "wide.idx", np.int64, tmp_path / "lengths")
    report = report_of(IndexedDataset(tmp_path / "wide"), vocab_size=None, eod_token=None)
    assert "1 damaged: tokens that the vocabulary does not have (documents 1)" in report_lines(report)[1]


@pytest.mark.parametrize(("tokens", "note"), [
    (np.arange(2000) % 97 + 1, "note: {}: the end-of-document token is 0, but 1 of 1 sampled documents end with token"),
    (np.append(np.random.default_rng(0).integers(1, 400, 4000), 0), "note: {}: its tokens are in random order"),
    (np.zeros(0), "")])
def test_the_tool_notes_wrong_ends_and_random_order(tmp_path: Path, run: Callable[..., tuple[int, str]],
                                                    tokens: np.ndarray, note: str) -> None:
    prefix = tmp_path / "data"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document(tokens.astype(np.uint16))
        writer.finalize({"vocab_size": 500, "eod_token": 0})
    code, output = run("documents", prefix)
    assert (code, output.count("note: ")) == (0, int(bool(note)))
    assert note.format(prefix) in output


def test_the_page_shows_plots_and_text(data: IndexedDataset, tmp_path: Path, tokenizer: str,
                                       run: Callable[..., tuple[int, str]]) -> None:
    (tmp_path / "a.txt").write_text("Some text with <markup> & more.\n" * 4)
    (tmp_path / "b.txt").write_text("Other text.\n" * 3)
    prepare([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tokenizer=tokenizer, out=str(tmp_path / "data"))
    code, output = run("documents", tmp_path / "data", "--tokenizer", tokenizer, "--html", tmp_path / "page.html")
    assert (code, "2 documents" in output) == (0, True)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "<h3>sampled: document 0," in page
    assert "Some text with &lt;markup&gt; &amp; more." in page
    assert "<markup>" not in page
    # damaged documents give exit code 1, and are shown as numbers
    code, output = run("documents", data.prefix, "--tokenizer", tokenizer)
    assert code == 1
    assert f"{NORMAL + 2} damaged: tokens that the vocabulary does not have (documents 0, 1, 2, 3, 4, ...)" in output
    write_page(tmp_path / "page.html", data, report_of(data), None)
    assert "1 2 600 0" in (tmp_path / "page.html").read_text()
