"""Merge and split of token files, compared with documents in lists."""

import hashlib
import itertools
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data import copy_documents
from pretrain.data.data_spec import parse_split, split_documents
from pretrain.data.token_files.hashes import hashes_path, read_hashes
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from pretrain.extensions.merge_split import merge_split
from pretrain.extensions.merge_split.merge_split import choose, merge, split
from tests.support.rejection import rejection
from tests.support.sparse_data import write_sparse_data
from tests.wrong_inputs.case import main_of

Documents = list[list[list[int]]]  # documents, sequences, tokens
_TOKENIZER = {"vocab_size": 60_000, "tokenizer": "/a/tokenizer.model", "tokenizer_sha256": "ab" * 32, "eod_token": 2}
_sequences = st.lists(st.lists(st.integers(0, 60_000), max_size=5), max_size=3)


def _write(prefix: Path, documents: Documents, dtype: str = "<u2", meta: dict[str, Any] | None = None) -> str:
    """Write documents of several sequences, as Megatron-LM's --split-sentences makes, without hashes."""
    sequences = [sequence for document in documents for sequence in document]
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_tokens(np.array([*itertools.chain(*sequences)], dtype))
        writer.add_sequences([len(sequence) for sequence in sequences])
        writer.end_documents([*itertools.accumulate(map(len, documents))])
        writer.finalize(meta)
    hashes_path(prefix).unlink()
    return str(prefix)


def _read(prefix: Path | str) -> Documents:
    data = IndexedDataset(prefix)
    index, offsets = data.document_index(), data.sequence_offsets(0, data.num_sequences).tolist()
    return [[data.tokens(offsets[number], offsets[number + 1]).tolist() for number in range(first, last)]
            for first, last in itertools.pairwise(index.tolist())]


def _merge(output: Path | str, prefixes: Sequence[str], **flags: Any) -> list[str]:
    return merge(str(output), prefixes, **{"overwrite": False, "advance": lambda *_: None, **flags})[1]


def _split(prefix: Path | str, outputs: Sequence[Path], **flags: Any) -> list[IndexedWriter]:
    return split(str(prefix), [str(path) for path in outputs],
                 **{"overwrite": False, "advance": lambda *_: None, **flags})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(_sequences, max_size=6), min_size=1, max_size=3), st.integers(1, 4))
def test_merged_and_split_data_has_every_document_once(tmp_path_factory: pytest.TempPathFactory,
                                                       corpora: list[Documents], chunk: int) -> None:
    """With tiny chunks, every chunk boundary is reached; documents keep their sequences."""
    folder = tmp_path_factory.mktemp("merge")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_documents, "_CHUNK_TOKENS", chunk)
        for module in (copy_documents, merge_split):
            patch.setattr(module, "CHUNK_DOCUMENTS", chunk)
        prefixes = [_write(folder / f"part{number}", corpus) for number, corpus in enumerate(corpora)]
        _merge(folder / "all", prefixes)
        documents = [document for corpus in corpora for document in corpus]
        assert _read(folder / "all") == documents
        reference = _write(folder / "reference", documents)
        for ending in ("bin", "idx"):
            assert (folder / f"all.{ending}").read_bytes() == Path(f"{reference}.{ending}").read_bytes()
        if len(documents) < 2:
            return
        outputs = [folder / "first", folder / "second"]
        _split(folder / "all", outputs, documents="rest,1")
        assert [_read(path) for path in outputs] == [documents[:-1], documents[-1:]]
        _split(folder / "all", outputs, documents="1,rest", seed=3, overwrite=True)
        parts = [_read(path) for path in outputs]
        place = next(place for place in range(len(documents)) if
                     [documents[place]] == parts[0] and documents[:place] + documents[place + 1:] == parts[1])
        assert 0 <= place < len(documents)


@pytest.mark.parametrize(("dtypes", "merged"), [(("<u2", "<i4"), "int32"), (("<u1", "<u2"), "uint16"),
                                                (("<i8", "<u2"), "int64"), (("<u2", "<u2"), "uint16")])
def test_the_widest_type_holds_all_tokens(tmp_path: Path, dtypes: tuple[str, str], merged: str) -> None:
    corpora = [[[[1, 200]]], [[[3]], [[255, 4]]]]
    prefixes = [_write(tmp_path / str(number), corpus, dtype)
                for number, (corpus, dtype) in enumerate(zip(corpora, dtypes, strict=True))]
    _merge(tmp_path / "all", prefixes)
    assert _read(tmp_path / "all") == corpora[0] + corpora[1]
    assert IndexedDataset(tmp_path / "all").dtype == merged


def test_a_merge_has_hashes_and_the_facts_that_all_inputs_share(tmp_path: Path) -> None:
    first = _write(tmp_path / "a", [[[1, 1, 2]], [[7, 2]]], meta={**_TOKENIZER, "num_tokens": 5, "entropy_nats": 0.1})
    second = _write(tmp_path / "b", [[[9, 2]]], meta={**_TOKENIZER, "tokenizer": "/b/tokenizer.model"})
    assert _merge(tmp_path / "all", [first, second]) == []
    frequencies = np.array([2, 3, 1, 1]) / 7  # of the tokens 1, 2, 7 and 9
    entropy = -float((frequencies * np.log(frequencies)).sum())
    assert read_meta(tmp_path / "all") == {**_TOKENIZER, "num_tokens": 7, "num_documents": 3, "max_token": 9,
                                           "entropy_nats": pytest.approx(entropy)}
    hashes = read_hashes(hashes_path(tmp_path / "all"))
    assert hashes is not None
    assert hashes.blocks == (hashlib.sha256((tmp_path / "all.bin").read_bytes()).hexdigest(),)
    assert IndexedDataset(tmp_path / "all").is_described_by(hashes)
    (tmp_path / "all.summary.json").write_text("of the old files")
    stale = _write(tmp_path / "c", [[[3]]], meta={**_TOKENIZER, "num_tokens": 99})
    notes = _merge(tmp_path / "all", [first, stale], overwrite=True)
    assert notes == ["vocab_size, tokenizer, tokenizer_sha256, eod_token: left out of the .meta.json: not the same for "
                     "every input"]
    assert not (tmp_path / "all.summary.json").exists()
    assert "tokenizer" not in (read_meta(tmp_path / "all") or {})
    other = _write(tmp_path / "d", [[[3]]], meta={**_TOKENIZER, "eod_token": None})
    assert _merge(tmp_path / "all", [first, other], overwrite=True)[0].startswith("eod_token: left out")


def test_data_of_different_tokenizers_is_not_merged(tmp_path: Path) -> None:
    first = _write(tmp_path / "a", [[[1]]], meta=_TOKENIZER)
    plain = _write(tmp_path / "b", [[[1]]])
    other = _write(tmp_path / "c", [[[1]]], meta={**_TOKENIZER, "tokenizer": "/x.model", "tokenizer_sha256": "cd" * 32})
    assert rejection(_merge, tmp_path / "all", [first, plain, other]) == (
        f"{other}: it was prepared with another tokenizer (/x.model, SHA-256 cdcdcdcdcdcd) than {first} "
        "(/a/tokenizer.model, SHA-256 abababababab). Prepare all data with the same tokenizer.")
    assert not list(tmp_path.glob("all*"))


def test_existing_files_remain_without_the_flag(tmp_path: Path) -> None:
    first, second = (_write(tmp_path / name, [[[1]], [[2]]]) for name in "ab")
    for existing in ("all.bin", "all.idx", "all.meta.json", "all.sha256.json", "all.summary.json"):
        (tmp_path / existing).write_text("old")
        for run in (lambda: _merge(tmp_path / "all", [first, second]),
                    lambda: _split(first, [tmp_path / "x", tmp_path / "all"], proportions="1,1")):
            with pytest.raises(ConfigError, match=rf"{existing} exists. Give another prefix, or replace the files by "):
                run()
        assert (tmp_path / existing).read_text() == "old"
        (tmp_path / existing).unlink()
    for output in (first, f"{tmp_path}/../{tmp_path.name}/a"):
        with pytest.raises(ConfigError, match="is also an input"):
            _merge(output, [first, second], overwrite=True)
    with pytest.raises(ConfigError, match="is given twice"):
        _split(first, [tmp_path / "x", tmp_path / "x"], proportions="1,1")
    assert _read(first) == [[[1]], [[2]]]


def test_a_negative_token_is_not_copied(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a", [[[1, 2]]], "<i4")
    Path(f"{prefix}.bin").write_bytes(struct.pack("<2i", 1, -2))
    with pytest.raises(ConfigError, match=r"a\.bin: found token -2; expected no token below 0"):
        _merge(tmp_path / "all", [prefix])
    assert not list(tmp_path.glob("all*"))


@pytest.mark.parametrize("proportions", ["969,30,1", "98,1,1", "1,1,1"])
def test_consecutive_parts_are_those_of_a_run(tmp_path: Path, proportions: str) -> None:
    documents = [[[number % 50_000] * (number % 7)] for number in range(1500)]
    prefix = _write(tmp_path / "a", documents, meta={**_TOKENIZER, "num_tokens": sum(len(d[0]) for d in documents)})
    outputs = [tmp_path / name for name in ("train", "valid", "test")]
    writers = _split(prefix, outputs, proportions=proportions)
    for (first, last), output, writer in zip(split_documents(1500, parse_split(proportions)), outputs, writers,
                                             strict=True):
        assert _read(output) == documents[first:last]
        meta = read_meta(output)
        assert meta is not None
        assert (meta["tokenizer_sha256"], meta["num_documents"]) == (_TOKENIZER["tokenizer_sha256"], last - first)
        assert (writer.num_documents, writer.num_tokens) == (meta["num_documents"], meta["num_tokens"])


def test_random_parts_have_exact_sizes_and_every_document_is_as_likely() -> None:
    """200 splits of 3 * 2^16 + 5 documents: the choice does not depend on the chunk or on the place in it."""
    total, times = 3 * 2**16 + 5, np.zeros(3 * 2**16 + 5, np.int64)
    for seed in range(200):
        chosen = np.concatenate([choice for _, choice in choose(total, [total - 20_000, 20_000], seed)])
        assert (chosen == 1).sum() == 20_000
        assert (chosen == 0).sum() == total - 20_000
        times += chosen == 1
    expected = 200 * 20_000 / total
    for part in np.array_split(times, 50):  # a standard deviation is 0.5% of the mean
        assert abs(part.mean() / expected - 1) < 0.03
    parts = [np.concatenate([choice for _, choice in choose(100, [1, 2], seed)]) for seed in (1, 1, 2)]
    assert np.array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[0], parts[2])
    assert (parts[0] == -1).sum() == 97, "documents that no output gets"


WRONG_SPLITS = {
    "too few values": ({"proportions": "1"}, "--proportions: it has 1 values for 2 outputs of --out"),
    "a word": ({"proportions": "1,x"}, "--proportions: found '1,x'; expected numbers such as 969,30,1"),
    "NaN": ({"proportions": "1,nan"}, "--proportions: found '1,nan'"),
    "zero": ({"proportions": "0,0"}, "--proportions: found '0,0'"),
    "empty part": ({"proportions": "1,0"}, "y would have none of the 4 documents"),
    "too small": ({"proportions": "1,0.01"}, "y would have none of the 4 documents"),
    "too many": ({"documents": "3,2"}, "--documents: found 5 documents; expected at most 4"),
    "nothing left": ({"documents": "4,rest"}, "y would have none of the 4 documents"),
    "two rests": ({"documents": "rest,rest"}, "--documents: found 'rest,rest'"),
    "negative": ({"documents": "rest,-1"}, "--documents: found 'rest,-1'"),
    "fraction": ({"documents": "rest,1.5"}, "--documents: found 'rest,1.5'"),
}


@pytest.mark.parametrize("name", WRONG_SPLITS)
def test_wrong_sizes_are_rejected(tmp_path: Path, name: str) -> None:
    flags, message = WRONG_SPLITS[name]
    prefix = _write(tmp_path / "a", [[[number]] for number in range(4)])
    assert message in rejection(_split, prefix, [tmp_path / "x", tmp_path / "y"], **flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_too_little_space_is_reported_first(tmp_path: Path) -> None:
    prefix = write_sparse_data(tmp_path / "a", num_documents=1000, full_documents=1000, length=2**31 - 1)
    with pytest.raises(ConfigError, match=r"GB free, and 42,949\.\d GB are needed"):
        _merge(tmp_path / "all", [str(prefix)] * 10)
    assert not list(tmp_path.glob("all*"))


def test_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = _write(tmp_path / "a", [[[1, 2]], [[3], [4, 5, 6]], [[]]], meta={**_TOKENIZER, "entropy_nats": 1.5})
    second = _write(tmp_path / "b", [[[9]]])
    main = main_of("data")

    def run(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["data.py", *words])
        assert main() == 0
        return capsys.readouterr().out.splitlines()

    rows = dict(line.strip().split("  ", 1) for line in run("info", first)[1:] if "  " in line.strip())
    assert {name: value.strip() for name, value in rows.items()} == {
        "documents": "3", "tokens": "6 of uint16", "size": "12 bytes of tokens, 114 of index", "sequences": "4",
        "longest document": "4 tokens (document 1)", "shortest document": "0 tokens", "mean document": "2.0 tokens",
        "empty documents": "1", "tokenizer": "/a/tokenizer.model", "SHA-256 of it": "ab" * 32, "vocabulary": "60,000",
        "end of document": "2", "unigram entropy": "1.5000 nats per token",
        "hashes": f"none; `ds-pretrain data hash {first}` writes them"}
    assert run("verify", first) == [f"{first}: every entry of the .idx is right; the bytes cannot be compared: there "
                                    f"are no hashes. `ds-pretrain data hash {first}` writes them"]
    assert run("merge", f"{tmp_path}/all", first, second) == [
        "note: vocab_size, tokenizer, tokenizer_sha256, eod_token: left out of the .meta.json: not the same for every "
        "input", f"{tmp_path}/all: documents: 4; tokens: 7 of uint16"]
    assert run("verify", f"{tmp_path}/all") == [f"{tmp_path}/all: every byte has its hash"]
    assert "hashes             SHA-256 " in "\n".join(run("info", f"{tmp_path}/all"))
    assert run("split", f"{tmp_path}/all", "--documents", "rest,1", "--out", f"{tmp_path}/x", f"{tmp_path}/y") == [
        f"{tmp_path}/x: documents: 3; tokens: 6 of uint16", f"{tmp_path}/y: documents: 1; tokens: 1 of uint16"]


def test_a_merge_that_is_killed_or_stopped_leaves_no_files(tmp_path: Path) -> None:
    """After SIGTERM nothing remains; after SIGKILL, until the next merge."""
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for _ in range(10):
            writer.add_document(np.zeros(2**20, np.uint16))
        writer.finalize()
    command = [sys.executable, "-m", "pretrain", "data", "merge", str(tmp_path / "all")]

    def stop(number: int) -> tuple[int, list[str]]:
        with subprocess.Popen([*command, *[str(tmp_path / "a")] * 200], stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and not (tmp_path / f"all.bin.tmp-{process.pid}").exists():
                time.sleep(0.001)
            process.send_signal(number)
            assert process.stderr is not None
            lines = process.stderr.read().splitlines()
        return process.returncode, lines

    assert stop(signal.SIGKILL) == (-signal.SIGKILL, [])
    assert list(tmp_path.glob("all.bin.tmp-*"))
    assert stop(signal.SIGTERM) == (75, ["ds-pretrain: stopped by SIGTERM: give the same command again"])
    assert not list(tmp_path.glob("all*"))
    subprocess.run([*command, str(tmp_path / "a")], check=True)
    assert sorted(path.name for path in tmp_path.glob("all*")) == ["all.bin", "all.idx", "all.meta.json",
                                                                   "all.sha256.json"]


def test_where_the_documents_come_from_is_kept(tmp_path: Path) -> None:
    sources = {"files": 1, "list": [{"path": "/a.jsonl", "bytes": 9}]}
    facts = {**_TOKENIZER, "num_tokens": 5, "sources": sources, "filters": {"deduplicate": True},
             "fill_in_middle": {"rate": 0.5, "documents": 2}, "without_others": [{"removed_documents": 3}]}
    first = _write(tmp_path / "a", [[[1, 1, 2]], [[7, 2]]], meta=facts)
    second = _write(tmp_path / "b", [[[9, 2, 2, 2, 2]]], meta={**facts, "sources": {"files": 2}, "fill_in_middle": {}})
    _split(first, [tmp_path / "x", tmp_path / "y"], documents="1,1")
    kept = {**facts, "fill_in_middle": {"rate": 0.5}}
    for part in ("x", "y"):
        meta = read_meta(tmp_path / part) or {}
        assert {key: meta.get(key) for key in kept if key != "num_tokens"} == {
            key: value for key, value in kept.items() if key != "num_tokens"}
    _merge(tmp_path / "again", [str(tmp_path / "x"), str(tmp_path / "y")])
    again = read_meta(tmp_path / "again") or {}
    assert (again["sources"], again["filters"], "merged_from" in again) == (sources, {"deduplicate": True}, False)
    plain = _write(tmp_path / "c", [[[1, 2]]])
    _merge(tmp_path / "both", [first, second])
    meta = read_meta(tmp_path / "both") or {}
    assert (meta["filters"], "sources" in meta) == ({"deduplicate": True}, False)
    assert meta["merged_from"] == [
        {"data": first, "documents": 2, "sources": sources, "fill_in_middle": {"rate": 0.5}},
        {"data": second, "documents": 1, "sources": {"files": 2}}]
    _merge(tmp_path / "all", [str(tmp_path / "both"), plain])
    assert [part["data"] for part in (read_meta(tmp_path / "all") or {})["merged_from"]] == [
        str(tmp_path / "both"), plain]
