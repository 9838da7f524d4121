"""Files of unknown content are read in bounded time and memory: holes, endless lines, devices, FIFOs, sockets."""

import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pretrain.stored_json as stored
from pretrain.distributed.process import PROGRAM, ROOT
from pretrain.monitor.read_run_folder import Tail, read_metrics
from pretrain.stored_json import read_lines, read_settings, read_text

LIMIT_BYTES = 2**31  # of address space: ten times what these programs take without torch
NOT_FILES = ("device", "FIFO", "socket", "folder", "loop")


def _put(kind: str, path: Path) -> None:
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "hole":
        path.touch()
        os.truncate(path, 2**40)
    elif kind == "line":
        with path.open("wb") as file:
            for _ in range(300):
                file.write(b"[" * 2**20)


def _naive(content: bytes, offset: int) -> list[bytes]:
    lines = content[offset:].split(b"\n")
    return lines if lines[-1] else lines[:-1]


@pytest.mark.parametrize("seed", range(40))
def test_lines_are_those_of_the_file(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of a few bytes, each place of a boundary occurs."""
    numbers = random.Random(seed)
    monkeypatch.setattr(stored, "_BLOCK_BYTES", numbers.randint(1, 20))
    content = b"".join(numbers.choice((b"\n", b"ab", b"{}", b"\r\n", b"x" * 7)) for _ in range(numbers.randint(0, 60)))
    path = tmp_path / "rows"
    path.write_bytes(content)
    offset = numbers.randint(0, len(content))
    blocks = list(read_lines(path, offset))
    assert [line for lines, _ in blocks for line in lines] == _naive(content, offset)
    for number, (_, position) in enumerate(blocks):
        rest = [line for lines, _ in blocks[number + 1:] for line in lines]
        if number + 1 < len(blocks):
            assert _naive(content, position) == rest


def test_long_lines_and_lines_with_holes_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(stored, "_LONGEST_LINE_BYTES", 20)
    path = tmp_path / "rows"
    path.write_bytes(b"a\n" + b"b" * 50 + b"\nc\n")
    with path.open("r+b") as file:
        file.seek(2**20)
        file.write(b"part\nd\n")
        file.truncate(2**40)
    assert [line for lines, _ in read_lines(path) for line in lines] == [b"a", b"", b"c", b"", b"d"]


def test_a_tail_follows_lines_that_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_BLOCK_BYTES", 16)
    path, tail = tmp_path / "metrics.jsonl", Tail(tmp_path / "metrics.jsonl")
    text = "".join(json.dumps({"step": step}) + "\n" for step in range(30)) + "no JSON\n" + '{"step": 30}'
    found, numbers = [], []
    with path.open("w") as file:
        for at in range(0, len(text), 7):
            file.write(text[at:at + 7])
            file.flush()
            for block in tail.blocks():
                numbers += [number for number, _ in block]
                found += [row["step"] for _, row in block]
    assert found == [*range(31)]
    assert numbers == [*range(30), 31]
    assert tail.offset == len(text)


@pytest.mark.parametrize("kind", [*NOT_FILES, "hole", "line"])
def test_no_reader_waits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "metrics.jsonl"
    _put(kind, path)
    assert read_metrics(tmp_path) == []
    assert Tail(path).rows() == []
    for read in (read_text, read_settings):
        with pytest.raises(OSError, match=r".+"):
            read(path)


def test_settings_may_come_from_a_pipe_of_the_shell(tmp_path: Path) -> None:
    ends = os.pipe()
    writer = threading.Timer(0.2, lambda: (os.write(ends[1], b"\xef\xbb\xbfseed: 1\n"), os.close(ends[1])))
    writer.start()
    assert read_settings(f"/dev/fd/{ends[0]}") == "seed: 1\n"
    writer.join()


@pytest.mark.parametrize("kind", ["hole", "device"])
def test_programs_end_on_every_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processes with little memory: `summary` of such rows, and `check` with such a --config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text('[{"flags": {"save": "x"}, "train_steps": 3}]')
    for name in ("metrics.jsonl", "config.yaml"):
        _put(kind, tmp_path / name)
    for words in (["summary", str(tmp_path)], ["check", "--config", "config.yaml"],
                  ["check", "--deepspeed_config", "config.yaml", "--model", "tiny"]):
        done = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, cwd=tmp_path,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        lines = done.stderr.splitlines()
        if words[0] == "summary" and done.returncode == 0:
            assert lines == [], "a run without rows"
            continue
        assert (done.returncode, len(lines)) == (2, 1), (words, done.stderr)
        assert lines[0].startswith("ds-pretrain: error: ")
