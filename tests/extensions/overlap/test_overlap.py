"""Overlap of training data and evaluation sets, compared with sets of tuples."""

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.copy_documents import provenance
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.token_files.inspect_files import verify_data
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.errors import ConfigError
from pretrain.extensions.overlap import ngrams
from pretrain.extensions.overlap.find_overlap import (
    OverlapResult,
    find_overlap,
    is_rearranged,
    open_train,
    remove_overlap,
)
from tests.data.prepare.helpers import SOURCES, TEXTS, jsonl
from tests.support.range_server import range_server
from tests.wrong_inputs.case import main_of

_documents = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=8)
_TOKENIZER = {"vocab_size": 60_000, "tokenizer": "/a/tokenizer.model", "tokenizer_sha256": "ab" * 32, "bos_token": None,
              "eod_token": None}


def _write(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2",
           meta: dict[str, Any] | None = None) -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
        writer.finalize(meta)
    return str(prefix)


def _read(prefix: Path | str) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.tokens(start, stop).tolist() for start, stop in itertools.pairwise(data.document_offsets().tolist())]


def _search(prefix: str, against: list[str], n: int, most: int = 10, **options: Any) -> OverlapResult:
    return find_overlap(open_train(prefix, None, overwrite=False), against,
                        **{"n": n, "most_documents": most, "tokenizer": None, "read": ReadSettings(), "workers": 1,
                           "advance": lambda *_: None, **options})


def _grams(document: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(document[start : start + n]) for start in range(len(document) - n + 1)]


@settings(max_examples=60, deadline=None)
@given(_documents, st.lists(_documents, min_size=1, max_size=2), st.integers(2, 7), st.integers(1, 3),
       st.integers(1, 9), st.sampled_from(["<u2", "<i4", "<i8"]), st.booleans())
def test_finds_what_sets_of_tuples_find(tmp_path_factory: pytest.TempPathFactory, train: list[list[int]],
                                        sets: list[list[list[int]]], n: int, most: int, size: int, dtype: str,
                                        collides: bool) -> None:
    """With tiny jobs and parts, documents and n-grams cross their borders. With the multiplier 0, all hashes are 0."""
    folder = tmp_path_factory.mktemp("overlap")
    prefixes = [_write(folder / str(number), documents) for number, documents in enumerate(sets)]
    wanted = [[_grams(document, n) for document in documents] for documents in sets]
    evaluated = {gram for documents in wanted for grams in documents for gram in grams}
    counts = {gram: sum(gram in _grams(document, n) for document in train) for gram in evaluated}
    matches = {gram for gram, count in counts.items() if 0 < count <= most}
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in ((ngrams, "_JOB_TOKENS", size), (ngrams, "_READ_DOCUMENTS", 3),
                                    (ngrams, "_PART_TOKENS", size + 1), (ngrams, "_COMPARED", 4),
                                    (ngrams, "_SMALLEST_FILTER", 1)):
            patch.setattr(module, name, value)
        if collides:
            patch.setattr(ngrams, "_MULTIPLIERS", (0, *ngrams._MULTIPLIERS))
        if not evaluated:
            with pytest.raises(ConfigError, match=f"no document has {n} tokens"):
                _search(_write(folder / "train", train, dtype), prefixes, n, most)
            return
        result = _search(_write(folder / "train", train, dtype), prefixes, n, most)
    contaminated = [number for number, document in enumerate(train) if matches & set(_grams(document, n))]
    assert result.overlap.contaminated_documents().tolist() == contaminated
    for report, documents in zip(result.reports, wanted, strict=True):
        grams = [gram for document in documents for gram in document]
        assert (report.documents, report.ngrams) == (len(documents), len(grams))
        assert report.short_documents == sum(not document for document in documents)
        assert report.matched_ngrams == sum(gram in matches for gram in grams)
        assert report.frequent_ngrams == sum(counts[gram] > most for gram in grams)
        assert report.matched_documents == sum(bool(matches & set(document)) for document in documents)
        for worst in report.worst:
            number = int(worst.place.split()[-1])
            assert worst.matched_ngrams == sum(gram in matches for gram in documents[number])
            shared = [len(matches & set(documents[number]) & set(_grams(document, n))) for document in train]
            assert shared[worst.train_document] == max(shared)
    assert result.to_json()["contaminated_train_tokens"] == sum(len(train[number]) for number in contaminated)
    if len(contaminated) < len(train):
        remove_overlap(result, str(folder / "clean"), lambda *_: None)
        assert _read(folder / "clean") == [document for number, document in enumerate(train)
                                           if number not in contaminated]


def test_a_collision_with_training_tokens_is_never_a_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hashes are 0: each n-gram of the training data has the hash of the only n-gram of the evaluation set."""
    monkeypatch.setattr(ngrams, "_MULTIPLIERS", (0,))
    train = np.random.default_rng(0).integers(0, 9, 5000).tolist()
    text = train[1234:1247]
    result = _search(_write(tmp_path / "train", [train, [*train[:99], 10]]), [_write(tmp_path / "eval", [text])], 13)
    assert result.overlap.documents.tolist() == [0]
    assert result.overlap.documents_with.tolist() == [1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data of 60 documents; documents 3 and 10 to 29 contain evaluation texts, the latter the same one."""
    folder = tmp_path_factory.mktemp("data")
    train_sentencepiece([str(path) for path in SOURCES], folder / "tok", vocab_size=600)
    rare, common = TEXTS[0][2000:2400], TEXTS[1][1000:1200]
    rng = np.random.default_rng(0)

    def filler() -> str:
        return "".join(f"word{number} " for number in rng.integers(0, 10**6, 200))

    texts = [filler() + (rare if number == 3 else common if 10 <= number < 30 else "") + filler()
             for number in range(60)]
    prepare([jsonl(folder / "train.jsonl", texts)], tokenizer=str(folder / "tok"), out=str(folder / "train"))
    evaluation = jsonl(folder / "eval.jsonl", ["not in it: " + filler(), rare, common, "short"], key="question")
    prepare([evaluation], tokenizer=str(folder / "tok"), out=str(folder / "eval"),
            settings=PrepareSettings(ReadSettings(jsonl_key="question"), prepend_bos=False))
    return folder


def _command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["data", "overlap", *map(str, words)])
    return int(main_of("data overlap")())


def test_text_and_token_files_give_the_same_report(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for number, words in enumerate(([folder / "eval"], [folder / "eval.jsonl", "--jsonl_key", "question"])):
        assert _command(monkeypatch, folder / "train", "--against", *words, "--workers", 1 + number,
                        "--json", tmp_path / "report.json") == 0
        found.append(json.loads((tmp_path / "report.json").read_text()))
    places = [[worst.pop("place") for report in values["sets"] for worst in report["worst"]] for values in found]
    assert places == [["document 1"], [f"{folder}/eval.jsonl:2"]]
    names = [values["sets"][0].pop("name") for values in found]
    assert names == [f"{folder}/eval", f"{folder}/eval.jsonl"]
    assert found[0] == found[1]
    (report,) = found[0]["sets"]
    assert (report["documents"], report["short_documents"], report["matched_documents"]) == (4, 1, 1)
    (worst,) = report["worst"]
    assert worst["train_document"] == 3
    assert worst["matched_ngrams"] > 0.9 * worst["ngrams"]  # only tokens at its edges differ inside another text
    assert worst["text"].removesuffix(" ...") in TEXTS[0]
    assert report["frequent_ngrams"] > 50
    assert (found[0]["contaminated_train_documents"], found[0]["max_documents"]) == (1, 10)
    printed = capsys.readouterr().out
    assert "documents          4, 1 of them shorter than 13 tokens" in printed
    assert re.search(r"document 1: [\d.]+% of its 13-grams; training document 3\n", printed)
    assert f"{folder}/train: 1 of 60 documents (1.67%)" in printed


def test_remove_writes_data_without_the_matches(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.glob("train.*")}
    clean = tmp_path / "clean"
    words = [folder / "train", "--against", folder / "eval", "--max_documents", 20, "--remove", "--out", clean]
    assert _command(monkeypatch, *words) == 0
    removed = {3, *range(10, 30)}
    assert _read(clean) == [document for number, document in enumerate(_read(folder / "train"))
                            if number not in removed]
    assert "clean: documents: 39" in capsys.readouterr().out
    assert verify_data(str(clean), lambda *_: None)[0] == []
    meta, source = read_meta(clean), read_meta(folder / "train")
    assert meta is not None
    assert source is not None
    assert [meta[key] for key in ("tokenizer_sha256", "eod_token")] == [source[key] for key in ("tokenizer_sha256",
                                                                                              "eod_token")]
    (note,) = meta["without_overlap"]
    assert (note["ngram"], note["max_documents"], note["removed_documents"]) == (13, 20, 21)
    assert len(note["source_sha256"]) == len(note["against"][0]["tokens_sha256"]) == 64
    assert provenance(IndexedDataset(clean))["without_overlap"] == [note]  # data sets that are made from it keep it
    assert {path: path.read_bytes() for path in folder.glob("train.*")} == before
    with pytest.raises(ConfigError, match="exists"):
        _command(monkeypatch, *words)
    with pytest.raises(ConfigError, match="train is also an input"):
        _command(monkeypatch, folder / "train", "--against", folder / "eval", "--remove", "--overwrite", "--out",
                 folder / "train")
    assert _search(str(clean), [str(folder / "eval")], 13, 20).reports[0].matched_ngrams == 0


def test_token_files_on_a_server_are_evaluation_sets(folder: Path) -> None:
    with range_server(folder) as server:
        found = [_search(str(folder / "train"), [f"{where}/eval"], 13) for where in (folder, server.url)]
    local, remote = ({**report.to_json(), "sets": [{**each, "name": ""} for each in report.to_json()["sets"]]}
                     for report in found)
    assert local == remote


def test_several_processes_give_the_same_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "_JOB_TOKENS", 3000)
    results = [_search(str(folder / "train"), [str(folder / "eval")], 5, workers=workers) for workers in (1, 2)]
    assert results[0].to_json() == results[1].to_json()
    assert np.array_equal(results[0].overlap.documents_with, results[1].overlap.documents_with)


def test_what_cannot_be_compared_is_rejected_or_noted(folder: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    train, evaluation = folder / "train", folder / "eval"
    other = _write(tmp_path / "other", [[*range(20)]], meta=_TOKENIZER)
    plain = _write(tmp_path / "plain", [[*range(20)]])
    blank = tmp_path / "blank.jsonl"
    blank.write_text('\n{"text": ""}\n')
    for words, message in (
            ([train, "--against", other], "it was prepared with another tokenizer"),
            ([train, "--against", train], "it is the training data itself"),
            ([train, "--against", evaluation, "--remove"], "Give both flags or none"),
            ([train, "--against", evaluation, "--out", tmp_path / "x"], "Give both flags or none"),
            ([train, "--against", folder / "eval.jsonl"], "no key 'text'"),
            ([train, "--against", evaluation, "--tokenizer", "bytes"], "bytes: .*train was prepared with another one"),
            ([train, "--against", tmp_path / "none"], "none"),
            ([train, "--against", _write(tmp_path / "tiny", [[*range(12)]])], "no document has 13 tokens"),
            ([train, "--against", blank], "no document has 13 tokens"),
            ([plain, "--against", folder / "eval.jsonl"], "Give it by --tokenizer"),
            ([other, "--against", folder / "eval.jsonl"], "other.meta.json names this tokenizer"),
            ([plain, "--against", _write(tmp_path / "all", [[*range(20)]]), "--remove", "--out", tmp_path / "y"],
             "none would remain")):
        with pytest.raises(ConfigError, match=message) as error:
            _command(monkeypatch, *words)
        assert "\n" not in str(error.value)
    assert _search(str(train), [plain], 13).notes == (
        f"{plain}: no .meta.json names the tokenizer; the comparison is right only if all data has the same one",)
    assert _search(str(train), [str(evaluation)], 13).notes == ()


def test_rearranged_training_data_is_noted(tmp_path: Path) -> None:
    tokenizer = train_sentencepiece([str(path) for path in SOURCES], tmp_path / "tok", vocab_size=600)
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    prepare([source], tokenizer=str(tokenizer.path), out=str(tmp_path / "train"))
    meta = tmp_path / "train.meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "fill_in_middle": {"rate": 0.5}}))
    result = _search(str(tmp_path / "train"), [source], 13)
    assert "rearranged by --fim_rate" in result.notes[0]
    parts = [{"data": "a"}, {"merged_from": [{"fill_in_middle": {"rate": 0.5}}]}]
    assert is_rearranged({"fill_in_middle": {}, "merged_from": parts})
    assert not is_rearranged({"fill_in_middle": {}, "merged_from": parts[:1]})
