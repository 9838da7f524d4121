"""Large .idx files: they are opened without reading all of them; damage, fingerprints, hashes and memory."""

import contextlib
import errno
import hashlib
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.token_files import index_file
from pretrain.data.token_files.check_hashes import find_hashes, hash_if_fast
from pretrain.data.token_files.hashes import hashes_path, read_hashes
from pretrain.data.token_files.indexed_dataset import IndexedDataset, open_checked
from pretrain.data.token_files.inspect_files import measure_lengths
from pretrain.data.token_files.writer import IndexedWriter, write_index
from pretrain.errors import ConfigError
from tests.support.rejection import rejection
from tests.support.sparse_data import write_sparse_data

_OPEN = r"""
import re, sys, time
from pretrain.data.token_files.indexed_dataset import IndexedDataset, open_checked
from pretrain.data.samples.shuffled import ShuffledWindows
start = time.perf_counter()
data = ShuffledWindows(IndexedDataset(sys.argv[1]), seq_length=2048, seed=1)
assert data.samples([10**9]).shape == (1, 2049)
first, last = data.indexed.num_documents - 3, data.indexed.num_documents
print(data.indexed.num_documents, *data.indexed.document_offsets(first, last))
peak = re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())  # getrusage counts the parent too
print(int(peak[1]) / 1024, "MiB,", time.perf_counter() - start, "s")
"""
_ENTRIES = 300_000
_DAMAGED_ENTRY = 150_777  # of no sampled run


def test_a_billion_documents_are_opened_with_little_memory(tmp_path: Path) -> None:
    """The file has 2.1e12 tokens. Reading its index, as Megatron-LM's writer made it, would take 20 GB."""
    length = 2**31 - 1
    prefix = write_sparse_data(tmp_path / "a", num_documents=10**9, full_documents=1000, length=length)
    done = subprocess.run([sys.executable, "-c", _OPEN, str(prefix)], capture_output=True, text=True, check=True)
    documents, resources = done.stdout.splitlines()
    print(resources)
    assert documents == f"1000000000 {997 * length} {998 * length} {999 * length} {1000 * length}"
    assert float(resources.split()[0]) < 200


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a data set of 6 MB of index."""
    folder = tmp_path_factory.mktemp("original")
    lengths = np.random.default_rng(5).integers(0, 40, _ENTRIES)
    with IndexedWriter(folder / "a", np.uint16) as writer:
        writer.add_documents(np.arange(lengths.sum()) % 50_000, np.cumsum(lengths))
        writer.finalize()
    return folder


@pytest.fixture
def large(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prefix of a copy, whose index counts as large."""
    monkeypatch.setattr(index_file, "SMALL_INDEX_BYTES", 2**20)
    for path in original.iterdir():
        shutil.copy2(path, tmp_path)
    assert not IndexedDataset(tmp_path / "a").index.is_small
    return tmp_path / "a"


def test_entries_of_a_large_index_are_read_on_demand(large: Path) -> None:
    data, content = IndexedDataset(large), Path(f"{large}.idx").read_bytes()
    lengths = np.frombuffer(content, "<i4", _ENTRIES, 34)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    assert np.array_equal(data.document_offsets(), bounds)
    for first, last in ((0, 0), (0, 1), (7, 9), (_ENTRIES - 1, _ENTRIES), (_ENTRIES, _ENTRIES)):
        assert data.document_offsets(first, last).tolist() == bounds[first:last + 1].tolist()
        assert data.sequence_lengths(first, last).tolist() == lengths[first:last].tolist()
        assert data.document_index(first, last).tolist() == list(range(first, last + 1))
        assert data.document_offset(first) == bounds[first]
    for first, last in ((-1, 3), (3, 2), (0, _ENTRIES + 1)):
        with pytest.raises(IndexError):
            data.document_offsets(first, last)
        with pytest.raises(IndexError):
            data.sequence_lengths(first, last)


def _change(prefix: Path, position: int, content: bytes) -> None:
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.seek(position)
        file.write(content)


_AT = {"length": (34, 4, "i"), "pointer": (34 + 4 * _ENTRIES, 8, "q"), "document": (34 + 12 * _ENTRIES, 8, "q")}


@pytest.mark.parametrize(("array", "value", "message"), [
    ("length", -1, "a sequence of -1 tokens"), ("length", 1000, "sequence {next} at byte"),
    ("pointer", 2, "sequence {entry} at byte 2 of the .bin; expected byte"),
    ("pointer", -2, "sequence {entry} at byte -2 of the .bin; expected byte"),
    ("document", 5, "a document index that falls between its entries")])
def test_damage_is_found_by_a_start_at_both_ends_and_anywhere_by_a_full_check(
        large: Path, array: str, value: int, message: str) -> None:
    """A start reads 128 runs of 512 entries. Damage between them is found by `ds-pretrain data verify` only."""
    start, width, letter = _AT[array]
    for entry in (100, _ENTRIES - 100, _DAMAGED_ENTRY):
        before = Path(f"{large}.idx").read_bytes()
        _change(large, start + width * entry, struct.pack(f"<{letter}", value))
        error = rejection(open_checked if entry == _DAMAGED_ENTRY else IndexedDataset, str(large))
        assert f"{large}.idx: found {message.format(entry=entry, next=entry + 1)}" in error
        if entry == _DAMAGED_ENTRY:
            damaged = IndexedDataset(large)
            with pytest.raises(ConfigError) if array != "length" else contextlib.nullcontext():
                measure_lengths(damaged, lambda *_: None)
        Path(f"{large}.idx").write_bytes(before)
    open_checked(str(large))


def test_an_index_that_is_truncated_while_it_is_in_use_is_an_error(large: Path) -> None:
    data = IndexedDataset(large)
    os.truncate(f"{large}.idx", 3_000_000)
    assert data.sequence_lengths(0, 5).size == 5
    with pytest.raises(ConfigError, match=r"a\.idx: the file was truncated to 3000000 bytes while it was in use"):
        data.document_offset(_ENTRIES // 2)


def test_a_disk_that_fails_is_an_error(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.pread

    def fail(descriptor: int, num_bytes: int, start: int) -> bytes:
        if start > 1000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, num_bytes, start)

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ConfigError, match=r"a\.idx: it cannot be read: Input/output error\. Start again when it can"):
        IndexedDataset(large)


def test_a_document_index_that_falls_where_it_is_used_is_an_error(large: Path) -> None:
    data = IndexedDataset(large)
    start, width, _ = _AT["document"]
    _change(large, start + width * _DAMAGED_ENTRY, struct.pack("<q", 2**40))
    for first in (_DAMAGED_ENTRY, _DAMAGED_ENTRY - 1):
        with pytest.raises(ConfigError, match="of its document index do not rise within 0 to 300000"):
            data.document_offsets(first, _DAMAGED_ENTRY)


def test_the_fingerprint_of_a_small_index_has_all_of_its_bytes(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints have it: SHA-256 of the .idx and of 64 samples of 1024 tokens."""
    content, data = Path(f"{large}.bin").read_bytes(), IndexedDataset(large)
    starts = np.linspace(0, data.num_tokens - 1024, 64).astype(np.int64).tolist()
    expected = hashlib.sha256(Path(f"{large}.idx").read_bytes() +
                              b"".join(content[2 * start:2 * start + 2048] for start in starts)).hexdigest()
    assert data.fingerprint != expected
    monkeypatch.setattr(index_file, "SMALL_INDEX_BYTES", 2**30)
    assert IndexedDataset(large).fingerprint == expected


def test_the_fingerprint_of_a_large_index_depends_on_samples_of_it(large: Path, tmp_path: Path) -> None:
    fingerprint = IndexedDataset(large).fingerprint
    assert IndexedDataset(large).fingerprint == fingerprint
    lengths = IndexedDataset(large).sequence_lengths().copy()
    lengths[[10, 20]] += [-1, 1] if lengths[10] else [1, -1]
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    write_index(tmp_path / "a.idx", np.uint16, tmp_path / "lengths")
    assert IndexedDataset(large).fingerprint != fingerprint


def test_a_start_does_not_hash_a_large_index(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file.IndexFile, "_digest", None)
    data = IndexedDataset(large)
    found = find_hashes(data, large.parent / "none")
    assert found.current == read_hashes(hashes_path(large))
    assert found.current is not None
    assert data.idx_sha256 == found.current.idx_sha256 != ""
    status = Path(f"{large}.idx").stat()
    os.utime(f"{large}.idx", ns=(0, status.st_mtime_ns + 1))  # another index, or the same one: not known
    found = find_hashes(IndexedDataset(large), large.parent / "none")
    assert (found.current, found.earlier) == (None, read_hashes(hashes_path(large)))
    Path(f"{large}.sha256.json").unlink()
    data = IndexedDataset(large)
    hash_if_fast(data, 60)
    assert (data.hashes, data.known_sha256(), data.idx_sha256) == (None, None, "")


def test_more_files_than_the_limit_of_open_files(tmp_path: Path) -> None:
    """The soft limit is often 1,024, and a blend may have more files."""
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.finalize()
    code = "import resource, sys\n" \
           "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))\n" \
           "from pretrain.data.token_files.indexed_dataset import IndexedDataset\n" \
           "from pretrain.data.token_files.token_file import allow_open_files\n" \
           "allow_open_files(200)\n" \
           "print(len([IndexedDataset(sys.argv[1]) for _ in range(100)]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert done.stdout == "100\n"
