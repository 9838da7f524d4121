"""A preparation that is killed or stopped: the resumed output is byte-equal."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pretrain.data.prepare.partial_output
import pretrain.data.prepare.tokenize_batch
import pretrain.data.text_inputs.reader
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.token_files.hashes import hashes_path, read_hashes
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from tests.data.prepare.helpers import SOURCES, TEXTS, TOOL, jsonl, output
from tests.data.prepare.test_worker_pool import wait_gone

SKIP = ReadSettings(skip_errors=True)
_CALLS = ("pwrite", "fsync", "replace", "ftruncate", "unlink", "posix_fallocate", "pread", "open", "rename", "rmdir")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and blocks, and a saved state after each batch."""
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(pretrain.data.prepare.tokenize_batch, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(pretrain.data.prepare.partial_output, "_LARGEST_COST", float("inf"))


def corpus(folder: Path) -> list[str]:
    """Write inputs with duplicates, empty, damaged and long documents."""
    lines = jsonl(folder / "a.jsonl", [*TEXTS[:4], "", TEXTS[1], TEXTS[0][:9000]])
    with open(lines, "ab") as file:
        file.write(b'{"text": 5}\n{"text": "\xff"}\n')
    (folder / "cut.txt").write_bytes(TEXTS[2].encode()[:9000] + b"\xff" + TEXTS[1].encode())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "long.txt").write_text(TEXTS[3] * 3)
    (folder / "again.txt").write_text(TEXTS[3] * 3)
    return [lines, *(str(folder / name) for name in ("cut.txt", "empty.txt", "long.txt", "again.txt")),
            *map(str, SOURCES)]


def kill_at_call(number: int) -> None:
    """Kill this process just before the given call of the operating system (counted from 1), or in a write."""
    left = [number]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "pwrite":  # a part of the bytes
                    call(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return run

    for name in _CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def in_child(work: Callable[[], object]) -> int:
    """Call `work` in a forked child, and return its exit status: -9 if it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("deduplicate", "step"), [(True, 120), pytest.param(True, 25, marks=pytest.mark.slow),
                                                   pytest.param(False, 25, marks=pytest.mark.slow)])
def test_output_is_byte_equal_after_a_kill_at_any_system_call(tmp_path: Path, tokenizer: Tokenizer, small: None,
                                                              deduplicate: bool, step: int) -> None:
    inputs = corpus(tmp_path)

    def run(out: str) -> None:
        prepare(inputs, tokenizer=str(tokenizer.path), out=str(tmp_path / out), workers=1, seconds_between_states=0,
                settings=PrepareSettings(SKIP, deduplicate=deduplicate))

    run("whole")
    expected = output(tmp_path / "whole")
    summary = json.loads(expected["summary.json"])
    assert (summary["skipped_documents"], summary["empty_documents"], summary["duplicate_documents"]) == (3, 2, 6)
    generator = random.Random(step + deduplicate)
    position, num_kills = 0, 0
    while True:  # each child is killed at a later call, and many are killed again while they resume
        position += generator.randrange(1, 2 * step)
        killed = in_child(lambda at=position: (kill_at_call(at), run("out")))  # type: ignore[misc]
        if killed == 0:
            break
        assert killed == -signal.SIGKILL
        num_kills += 1
        while generator.random() < 0.6 and not (tmp_path / "out.idx").exists():
            num_kills += in_child(lambda: (kill_at_call(generator.randrange(1, 2 * step)), run("out"))) != 0
        if (tmp_path / "out.partial" / "state.json").exists() or not (tmp_path / "out.idx").exists():
            run("out")
        assert output(tmp_path / "out") == expected
        for path in tmp_path.glob("out.*"):
            if path.is_file():
                path.unlink()
    assert num_kills >= 3
    assert output(tmp_path / "out") == expected
    assert not list(tmp_path.glob("out.partial/*"))
    hashes = read_hashes(hashes_path(tmp_path / "out"))
    assert hashes is not None
    assert hashes.describes_bin((tmp_path / "out.bin").stat())
    assert hashes.describes_idx((tmp_path / "out.idx").stat())


_PROGRAM = """
import os, runpy, sys, time
import pretrain.data.text_inputs.reader as batches
import pretrain.data.prepare.partial_output as partial_output
batches.CHUNK_BYTES = 20_000  # many batches, so that a small corpus takes a while
partial_output._SECONDS_BETWEEN_STATES, partial_output._LARGEST_COST = 0.0, float("inf")
save = partial_output.PartialOutput.save
def save_slowly(output, state):
    save(output, state)
    time.sleep(float(os.environ["PAUSE"]))
partial_output.PartialOutput.save = save_slowly
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Command:
    """The command prepare_data.py, which saves its state after each batch and then pauses."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, copies: int = 12) -> None:
        self.folder, self.out = folder, folder / "out"
        source = jsonl(folder / "a.jsonl", [f"{number} {text}" for number in range(copies) for text in TEXTS])
        (folder / "b.txt").write_text("".join(TEXTS) * 2)
        (folder / "program.py").write_text(_PROGRAM)
        self.words = [sys.executable, str(folder / "program.py"), str(TOOL), source, str(folder / "b.txt"),
                      "--tokenizer", str(tokenizer.path), "--out"]

    def start(self, *words: str, out: str = "out", pause: float = 0.0) -> "subprocess.Popen[str]":
        return subprocess.Popen([*self.words, str(self.folder / out), "--workers=2", *words], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, start_new_session=True,
                                env={**os.environ, "PAUSE": str(pause)})

    def finish(self, *words: str, out: str = "out") -> dict[str, bytes]:
        process = self.start(*words, out=out)
        printed, errors = process.communicate(timeout=900)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
        assert "documents by number of tokens" in printed
        return output(self.folder / out)

    def wait_for_state(self, process: "subprocess.Popen[str]") -> list[int]:
        """Wait until a state has been saved. Return the ids of the workers."""
        deadline = time.monotonic() + 600
        workers: list[int] = []
        while len(workers) < 2 or not (self.folder / "out.partial" / "state.json").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
            workers = [pid for pid in children(process.pid) if is_worker(pid)]
        return workers


def children(pid: int) -> list[int]:
    lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(word) for words in lists for word in words.split()]


def is_worker(pid: int) -> bool:
    try:
        return b"pretrain.data.prepare.worker_pool" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_signals_and_killed_processes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each start continues the work of the one before. The processes end, and the last output is byte-equal."""
    command = Command(tmp_path, tokenizer, copies=30)  # so that each start has work left when it is stopped
    done = []
    for whom, which, code, message in (
            ("worker", signal.SIGKILL, 2, "one of 2 worker processes was killed"),
            ("parent", signal.SIGTERM, 75, "stopped by SIGTERM"), ("group", signal.SIGINT, 75, "stopped by SIGINT"),
            ("parent", signal.SIGKILL, -signal.SIGKILL, ""), ("group", signal.SIGHUP, 75, "stopped by SIGHUP")):
        process = command.start(pause=0.2)
        workers = command.wait_for_state(process)
        time.sleep(0.3)
        if whom == "group":
            os.killpg(process.pid, which)
        else:
            os.kill(workers[0] if whom == "worker" else process.pid, which)
        errors = process.communicate(timeout=900)[1]
        assert process.returncode == code, errors
        assert message in errors
        assert "Traceback" not in errors
        wait_gone(workers)
        assert errors.count("\n") <= 2 + bool(done), "the formats, what is continued, and the reason of the end"
        assert {path.name for path in tmp_path.glob("out*")} == {"out.partial"}
        done.append(json.loads((tmp_path / "out.partial" / "state.json").read_text())["done_bytes"])
    assert done == sorted(done)
    times = (tmp_path / "b.txt").stat()
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    rejected = command.start("--no-append_eod")
    errors = rejected.communicate(timeout=900)[1]
    os.utime(tmp_path / "b.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (rejected.returncode, errors.count("\n")) == (2, 1)
    assert f"was different: {tmp_path}/b.txt, --append_eod. Give the same command to continue it, or " \
        "--overwrite to start from the beginning." in errors
    # of compressed files, more bytes than there are may count as done
    state = tmp_path / "out.partial" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "done_bytes": 2**30}))
    resumed = command.finish("--workers=3")
    assert resumed == command.finish(out="whole")


def test_an_input_that_grows_while_it_is_read_is_named(tokenizer: Tokenizer, small: None, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = corpus(tmp_path)
    encode = Tokenizer.encode_batch

    def encode_and_grow(self: Tokenizer, *args: Any, **options: Any) -> Any:
        with open(inputs[0], "ab") as file:
            file.write(b"\n")
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_and_grow)
    with pytest.raises(ConfigError, match=f"{inputs[0]}: it was changed while it was read"):
        prepare(inputs, tokenizer=str(tokenizer.path), out=str(tmp_path / "out"), settings=PrepareSettings(SKIP),
                workers=1)
