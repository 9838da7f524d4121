"""Hashes of every byte of a data set: written with it, found again, checked block by block."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.data.token_files import check_hashes
from pretrain.data.token_files.check_hashes import check_blocks, find_hashes, hash_if_fast
from pretrain.data.token_files.hashes import (
    BLOCK_BYTES,
    BackgroundHash,
    DataHashes,
    hash_block,
    hashes_path,
    read_hashes,
    write_hashes,
)
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError
from tests.support.big_data import BYTE, NUM_BLOCKS, change_token, write_big_data
from tests.wrong_inputs.case import main_of


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a data set with hashes."""
    return write_big_data(tmp_path_factory.mktemp("big") / "corpus", hashes=True)


def _copy(big: Path, folder: Path) -> Path:
    """Copy a data set with its modification times. The file system may share the blocks."""
    for ending in ("bin", "idx", "meta.json", "sha256.json"):
        subprocess.run(["cp", "-p", "--sparse=always", f"{big}.{ending}", folder], check=True)
    return folder / big.name


def test_a_new_data_set_has_the_hashes_of_its_bytes(big: Path) -> None:
    data, hashes = IndexedDataset(big), read_hashes(hashes_path(big))
    content = Path(f"{big}.bin").read_bytes()
    assert hashes is not None
    assert hashes.blocks == tuple(hashlib.sha256(content[start:start + BLOCK_BYTES]).hexdigest()
                                  for start in range(0, len(content), BLOCK_BYTES))
    assert len(hashes.blocks) == NUM_BLOCKS
    assert hashes.is_complete
    found = find_hashes(data, big.parent / "none")
    assert (found.current, found.notes) == (hashes, ())
    hash_if_fast(data, seconds=600)
    assert data.hashes == hashes


def test_a_changed_token_with_the_old_modification_time_is_found_and_its_block_named(big: Path, tmp_path: Path) -> None:
    prefix = _copy(big, tmp_path)
    fingerprint = IndexedDataset(prefix).fingerprint
    check_blocks(IndexedDataset(prefix), find_hashes(IndexedDataset(prefix), tmp_path / "none"), seconds=600)
    change_token(prefix, keep_mtime=True)
    data = IndexedDataset(prefix)
    assert data.fingerprint == fingerprint, "the token is not one of the samples"
    found = find_hashes(data, tmp_path / "none")
    start = BYTE // BLOCK_BYTES * BLOCK_BYTES
    with pytest.raises(ConfigError, match=rf"corpus\.bin: bytes {start} to {start + BLOCK_BYTES} do not"):
        check_blocks(data, found, seconds=600)
    runs = 100  # each checks at least one block, chosen at random
    errors = 0
    for _ in range(runs):
        try:
            check_blocks(data, found, seconds=0)
        except ConfigError:
            errors += 1
    print(f"one block of {NUM_BLOCKS} checked at each start: found in {errors} of {runs} starts")
    assert 0 < errors < runs


def test_a_changed_token_with_a_new_modification_time_is_hashed_again(big: Path, tmp_path: Path) -> None:
    prefix = _copy(big, tmp_path)
    change_token(prefix, keep_mtime=False)
    data = IndexedDataset(prefix)
    found = find_hashes(data, tmp_path / "none")
    assert found.current is None
    assert found.earlier == read_hashes(hashes_path(big))
    check_blocks(data, found, seconds=600)
    hash_if_fast(data, seconds=600)
    assert data.hashes is not None
    assert found.earlier is not None
    different = [number for number in range(NUM_BLOCKS) if data.hashes.blocks[number] != found.earlier.blocks[number]]
    assert different == [BYTE // BLOCK_BYTES]
    assert data.hashes.sha256 != found.earlier.sha256


def test_a_rewritten_copy_with_the_same_bytes_is_the_same_data(big: Path, tmp_path: Path) -> None:
    data = IndexedDataset(write_big_data(tmp_path / "other_name"))
    assert find_hashes(data, tmp_path / "none").current is None
    hash_if_fast(data, seconds=600)
    hashes = read_hashes(hashes_path(big))
    assert data.hashes is not None
    assert hashes is not None
    assert data.hashes.sha256 == hashes.sha256


def test_slow_data_is_left_to_the_background(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(check_hashes, "hash_block", lambda *block: hashed.append(block[1]) or hash_block(*block))
    data = IndexedDataset(big)
    hash_if_fast(data, seconds=0)
    assert data.hashes is None
    assert hashed == [0]


def test_the_background_process_hashes_the_index_and_continues_after_the_first_blocks(big: Path) -> None:
    data, hashes = IndexedDataset(big), read_hashes(hashes_path(big))
    assert hashes is not None
    process = BackgroundHash(data.file, first=4, num_blocks=NUM_BLOCKS, index=data.index.file)
    process._process.wait(timeout=900)
    assert process.has_ended
    assert (tuple(process.read()), process.idx_sha256) == (hashes.blocks[4:], hashes.idx_sha256)
    process.close()


def test_the_background_process_ends_with_its_parent(big: Path) -> None:
    process = BackgroundHash(IndexedDataset(big).file, first=0, num_blocks=10**9)  # reads on after the end of the file
    assert not process.has_ended
    assert process._process.stdin is not None
    process._process.stdin.close()  # as the kernel does when the parent is killed
    assert process._process.wait(timeout=900) == 0


_GOOD = DataHashes(3 * BLOCK_BYTES, 5, "ab" * 32, 9, 5, ("cd" * 32, "ef" * 32))


def _damaged(**changes: object) -> str:
    return json.dumps({**json.loads(_GOOD.to_json()), **changes})


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "\0" * 99, "[" * 100_000, "{}", '{"bin_bytes": 1}', _damaged(bin_bytes="1"),
    _damaged(bin_bytes=-1), _damaged(bin_bytes=2**70), _damaged(bin_mtime_ns=1.5), _damaged(idx_sha256=None),
    _damaged(block_sha256={}), _damaged(block_sha256=["x"]), _damaged(block_sha256=["cd" * 32]),
    _damaged(block_sha256=["cd" * 32] * 99), _damaged(block_bytes=1), _damaged(sha256="00" * 32), _damaged(sha256=[]),
    _GOOD.to_json().replace("cdcd", "cdce", 1), _GOOD.to_json()[:-20]], ids=itertools.count())
def test_damaged_hashes_are_ignored_with_a_note(big: Path, tmp_path: Path, text: str) -> None:
    prefix = tmp_path / "corpus"
    for ending in ("bin", "idx"):
        os.link(f"{big}.{ending}", f"{prefix}.{ending}")
    hashes_path(prefix).write_text(text)
    found = find_hashes(IndexedDataset(prefix), tmp_path / "none")
    assert (found.current, found.earlier) == (None, None)
    assert len(found.notes) == 1
    assert found.notes[0].startswith(f"{prefix}.sha256.json is ignored and will be written again: ")
    assert "\n" not in found.notes[0]


def test_unreadable_hashes_are_ignored_with_a_note(big: Path, tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in tmp_path.iterdir():
        assert find_hashes(IndexedDataset(big), path).notes[0].startswith(f"{path} is ignored")


def test_two_processes_may_write_the_same_hashes(tmp_path: Path) -> None:
    path = tmp_path / "corpus.sha256.json"
    versions = (_GOOD, replace(_GOOD, blocks=_GOOD.blocks[:1]))
    write_hashes(path, _GOOD)
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(lambda version=version: [write_hashes(path, version) for _ in range(100)])
                   for version in versions]
        while not all(writer.done() for writer in writers):
            assert read_hashes(path) in versions
        assert [len(writer.result()) for writer in writers] == [100, 100]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_truncated_file_is_an_error_and_a_replaced_one_remains_readable(big: Path, tmp_path: Path) -> None:
    prefix = _copy(big, tmp_path)
    data = IndexedDataset(prefix)
    other = tmp_path / "new.bin"
    other.write_bytes(b"1" * 20)
    other.replace(f"{prefix}.bin")
    assert data.tokens(data.num_tokens - 3, data.num_tokens).tolist() == [0, 0, 0]
    os.truncate(f"/proc/self/fd/{data.file.descriptor}", 1000)
    assert data.tokens(490, 500).tolist() == [0] * 10
    with pytest.raises(ConfigError, match=r"corpus\.bin: the file was truncated to 1000 bytes while it was in use"):
        data.tokens(490, 501)


def test_the_file_is_closed_with_the_data_set(big: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    data = IndexedDataset(big)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del data
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_tool_hashes_and_verifies(big: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = _copy(big, tmp_path)
    main = main_of("data")

    def run(command: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["data.py", command, str(prefix)])
        return main(), capsys.readouterr().out

    assert run("verify") == (0, f"{prefix}: every byte has its hash\n")
    change_token(prefix, keep_mtime=True)
    start = BYTE // BLOCK_BYTES * BLOCK_BYTES
    assert run("verify") == (1, f"{prefix}.bin: bytes {start} to {start + BLOCK_BYTES} do not have the SHA-256 of "
                                f"{prefix}.sha256.json\n")
    code, output = run("hash")
    hashes = read_hashes(hashes_path(prefix))
    assert hashes is not None
    assert (code, output) == (0, f"{prefix}: SHA-256 {hashes.sha256}, written to {prefix}.sha256.json\n")
    assert run("verify")[0] == 0
    os.truncate(f"{prefix}.idx", 0)
    with pytest.raises(ConfigError, match=r"corpus\.idx"):
        run("verify")
