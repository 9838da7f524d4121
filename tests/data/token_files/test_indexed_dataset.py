"""Token files: written, and read with checks."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.token_files.index_file import dtype_for_vocab
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.token_files.writer import IndexedWriter, write_index
from pretrain.errors import ConfigError
from tests.support.rejection import rejection

LENGTHS = [3, 1, 4]
TOKENS = [5, 6, 7, 1, 65000, 2, 3, 4]


def idx_bytes(
    *, magic: bytes = b"MMIDIDX\0\0", version: int = 1, code: int = 8, lengths: list[int] = LENGTHS,
    pointers: list[int] | None = None, documents: list[int] | None = None, width: int = 2,
) -> bytes:
    starts = [sum(lengths[:i]) * width for i in range(len(lengths))]
    pointers = starts if pointers is None else pointers
    documents = list(range(len(lengths) + 1)) if documents is None else documents
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    head += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(documents))
    return head + struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(
        f"<{len(pointers)}q", *pointers) + struct.pack(f"<{len(documents)}q", *documents)


def write_pair(prefix: Path, idx: bytes, bin_: bytes) -> Path:
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(bin_)
    return prefix


def write_documents(prefix: Path, dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_documents(TOKENS[:4], [3, 4])
        writer.add_document(TOKENS[4:])
        writer.finalize()
    return prefix


@pytest.mark.parametrize(("dtype", "code", "letter"), [("uint16", 8, "H"), ("int32", 4, "i")])
def test_writes_the_bytes_of_the_format(tmp_path: Path, dtype: str, code: int, letter: str) -> None:
    write_documents(tmp_path / "a", dtype)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack(f"<8{letter}", *TOKENS)
    assert (tmp_path / "a.idx").read_bytes() == idx_bytes(code=code, width=struct.calcsize(letter))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.sha256.json"]


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_reads_the_bytes_of_the_format(tmp_path: Path, code: int, letter: str) -> None:
    tokens = [number % 128 for number in TOKENS]
    idx = idx_bytes(code=code, width=struct.calcsize("<" + letter))
    data = IndexedDataset(write_pair(tmp_path / "a", idx, struct.pack(f"<8{letter}", *tokens)))
    assert (data.num_tokens, data.num_documents) == (8, 3)
    assert data.document_offsets().tolist() == [0, 3, 4, 8]
    assert data.tokens(0, 8).tolist() == tokens
    assert data.tokens(3, 5).tolist() == tokens[3:5]
    assert data.tokens(0, 8).dtype == np.int64
    with pytest.raises(IndexError):
        data.tokens(0, 9)


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Megatron may split a document into sentences. A document then has several sequences."""
    data = IndexedDataset(write_pair(tmp_path / "a", idx_bytes(documents=[0, 2, 3]), struct.pack("<8H", *TOKENS)))
    assert data.document_offsets().tolist() == [0, 4, 8]


def test_windows_are_read_at_once(tmp_path: Path) -> None:
    data = IndexedDataset(write_documents(tmp_path / "a"))
    assert data.tokens_at([5, 0, 3], 3).tolist() == [TOKENS[5:8], TOKENS[0:3], TOKENS[3:6]]
    assert data.tokens_at(np.array([0]), 8).dtype == data.dtype
    assert data.tokens_at([], 3).shape == (0, 3)
    for starts in ([6], [-1], [0, 6]):
        with pytest.raises(IndexError):
            data.tokens_at(starts, 3)
    with (tmp_path / "a.bin").open("r+b") as file:
        file.truncate(9)
    assert data.tokens_at([1], 3).tolist() == [TOKENS[1:4]]
    with pytest.raises(ConfigError, match=r"a\.bin: the file was truncated to 9 bytes while it was in use"):
        data.tokens_at([0, 2], 3)


def test_documents_of_a_merged_file_of_gpt_neox(tmp_path: Path) -> None:
    """Older versions of `merge_file_` add no documents: each sequence is taken as a document."""
    for documents in ([0], [0, 0], [0, 1, 2]):
        data = IndexedDataset(write_pair(tmp_path / "a", idx_bytes(documents=documents), GOOD_BIN))
        assert data.document_offsets().tolist() == [0, 3, 4, 8]
        assert data.document_index(1, 2).tolist() == [1, 2]
        assert [data.document_offset(number) for number in range(4)] == [0, 3, 4, 8]
        assert data.num_documents == 3
        assert data.notes[0].startswith(f"{tmp_path}/a.idx: its document index ends at sequence {documents[-1]} of 3")
    assert IndexedDataset(write_pair(tmp_path / "a", idx_bytes(), GOOD_BIN)).notes == ()


def test_an_empty_pair_can_be_opened(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", "int32") as writer:
        writer.finalize()
    data = IndexedDataset(tmp_path / "a")
    assert (data.num_tokens, data.num_documents, data.document_offsets().tolist()) == (0, 0, [0])


GOOD_BIN = struct.pack("<8H", *TOKENS)
DAMAGED = {
    "magic": (idx_bytes(magic=b"MMIDIDY\0\0"), GOOD_BIN, "a.idx: found first bytes b'MMIDIDY"),
    "empty index": (b"", GOOD_BIN, "a.idx: found first bytes b''"),
    "header": (idx_bytes()[:20], GOOD_BIN, "20 bytes (truncated); expected a header of 34 bytes"),
    "version": (idx_bytes(version=2), GOOD_BIN, "version 2; expected version 1"),
    "code 6": (idx_bytes(code=6), GOOD_BIN, "dtype code 6 (float in one of Megatron-LM"),
    "code 7": (idx_bytes(code=7), GOOD_BIN, "dtype code 7 (float in one of Megatron-LM"),
    "code 9": (idx_bytes(code=9), GOOD_BIN, "dtype code 9; expected 1 u8"),
    "index cut": (idx_bytes()[:-8], GOOD_BIN, "94 bytes; expected 102 bytes for 3 sequences and 4 index entries"),
    "index too long": (idx_bytes() + b"\0", GOOD_BIN, "103 bytes; expected 102 bytes"),
    "offsets": (idx_bytes(pointers=[0, 8, 8]), GOOD_BIN, "sequence 1 at byte 8 of the .bin; expected byte 6"),
    "negative": (idx_bytes(lengths=[3, -1, 4], pointers=[0, 6, 4]), GOOD_BIN, "a sequence of -1 tokens"),
    "documents": (idx_bytes(documents=[0, 1, 4]), GOOD_BIN, "index from 0 to 4; expected values that rise from 0 to 3"),
    "first document": (idx_bytes(documents=[1, 3]), GOOD_BIN, "index from 1 to 3; expected values that rise from 0"),
    "modes": (idx_bytes() + bytes(3), GOOD_BIN, "a.idx: it has a mode for each sequence, as the multimodal data"),
    "not rising": (idx_bytes(documents=[0, 2, 1, 3]), GOOD_BIN, "document index"),
    "no documents": (idx_bytes(documents=[]), GOOD_BIN, "a document index without entries"),
    "bin cut": (idx_bytes(), GOOD_BIN[:-1], "a.bin: found 15 bytes (truncated, or of another .idx); expected 16"),
    "bin too long": (idx_bytes(), GOOD_BIN + b"\0\0", "a.bin: found 18 bytes (too long, or of another .idx)"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pairs_are_rejected(tmp_path: Path, name: str) -> None:
    idx, bin_, message = DAMAGED[name]
    error = rejection(IndexedDataset, write_pair(tmp_path / "a", idx, bin_))
    assert message in error
    assert "rite it again " in error


@pytest.mark.parametrize(("left", "missing"), [("bin", "idx"), ("idx", "bin")])
def test_half_a_pair_is_rejected(tmp_path: Path, left: str, missing: str) -> None:
    write_documents(tmp_path / "a")
    (tmp_path / f"a.{missing}").unlink()
    assert (tmp_path / f"a.{left}").exists()
    with pytest.raises(ConfigError, match=rf"a\.{missing}: there is no such file"):
        IndexedDataset(tmp_path / "a")


def test_a_failed_write_keeps_the_old_pair(tmp_path: Path) -> None:
    write_documents(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "a", "uint16") as writer:  # noqa: PT012
        writer.add_document([1, 2])
        raise KeyError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_writer_rejects_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Give a prefix in a writable folder"), \
            IndexedWriter(tmp_path / "file" / "a", "uint16"):
        pass


def test_writer_creates_no_file_before_it_is_entered(tmp_path: Path) -> None:
    """A signal between the two would leave the file."""
    IndexedWriter(tmp_path / "a", "uint16")
    assert not list(tmp_path.iterdir())


def test_dtype_equals_that_of_megatron_and_gpt_neox() -> None:
    assert dtype_for_vocab(65_499) == np.uint16
    assert dtype_for_vocab(65_500) == np.int32


def test_the_fingerprint_depends_on_the_content(tmp_path: Path) -> None:
    first = IndexedDataset(write_documents(tmp_path / "a")).fingerprint
    assert IndexedDataset(write_documents(tmp_path / "b")).fingerprint == first
    changed = write_pair(tmp_path / "c", idx_bytes(), GOOD_BIN[:-2] + b"\x09\0")
    assert IndexedDataset(changed).fingerprint != first


def test_meta_json_is_read_and_validated(tmp_path: Path) -> None:
    assert read_meta(write_documents(tmp_path / "a")) is None
    with IndexedWriter(tmp_path / "a", "uint16") as writer:
        writer.add_document([1])
        writer.finalize({"vocab_size": 7})
    assert read_meta(tmp_path / "a") == {"vocab_size": 7}
    for content in ("{", json.dumps([1])):
        (tmp_path / "a.meta.json").write_text(content)
        with pytest.raises(ConfigError, match=r"a\.meta\.json"):
            read_meta(tmp_path / "a")
    write_documents(tmp_path / "a")
    assert read_meta(tmp_path / "a") is None, "the old .meta.json must be removed with the old pair"


_LONGEST = 2**31 - 1
_MANY = """
import re, sys
import numpy as np
from pretrain.data.token_files.writer import IndexedWriter

def peak_mib():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024

with IndexedWriter(sys.argv[1], np.uint16) as writer:
    ends = np.arange(1, 2**14 + 1)
    writer.add_documents(np.zeros(2**14, np.uint16), ends)
    before = peak_mib()
    for _ in range(2**8 - 1):
        writer.add_documents(np.zeros(2**14, np.uint16), ends)
    writer.finalize()
print(peak_mib() - before)
"""


def test_more_tokens_than_fit_32_bits(tmp_path: Path) -> None:
    """Three documents of 2^31 - 1 tokens in a sparse file: positions and bytes are 64-bit numbers everywhere."""
    prefix, lengths = tmp_path / "a", np.array([_LONGEST, _LONGEST, _LONGEST, 5], "<i4")
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    write_index(tmp_path / "a.idx", np.int32, tmp_path / "lengths")
    bounds = [0, _LONGEST, 2 * _LONGEST, 3 * _LONGEST, 3 * _LONGEST + 5]
    with (tmp_path / "a.bin").open("wb") as file:
        os.truncate(file.fileno(), 4 * bounds[-1])
        for number, start in enumerate(bounds[:-1]):
            os.pwrite(file.fileno(), np.array([number + 1] * 4, "<i4").tobytes(), 4 * start)
    data = IndexedDataset(prefix)
    assert data.document_offsets().tolist() == bounds
    assert data.tokens(bounds[2] - 2, bounds[2] + 2).tolist() == [0, 0, 3, 3]
    assert data.tokens_at(bounds[:-1], 5).tolist() == [[number] * 4 + [0] for number in range(1, 5)]
    assert data.tokens(bounds[3], bounds[4]).tolist() == [4, 4, 4, 4, 0]
    assert len(data.fingerprint) == 64


def test_a_document_of_2_to_31_tokens_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a: found a document of 2147483648 tokens; expected at most 2147483647"), \
            IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_sequences([3, _LONGEST, _LONGEST + 1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dtype", "tokens"), [("uint16", [0, 65_536]), ("uint16", [-1]), ("int32", [2**31]),
                                               ("uint8", [256]), ("int64", [2**63])])
def test_a_token_that_does_not_fit_is_never_wrapped(tmp_path: Path, dtype: str, tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"a: found tokens .* expected .* the range of {dtype}"), \
            IndexedWriter(tmp_path / "a", dtype) as writer:
        writer.add_document(np.array(tokens))
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    """4 million documents have an .idx of 84 MB."""
    done = subprocess.run([sys.executable, "-c", _MANY, str(tmp_path / "a")], capture_output=True, text=True,
                          check=True)
    print(f"{done.stdout.strip()} MiB")
    assert float(done.stdout) < 30
    data = IndexedDataset(tmp_path / "a")
    assert (data.num_documents, data.num_tokens) == (2**22, 2**22)
