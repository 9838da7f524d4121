"""Damaged copies of the JSON files of a real run folder, and the programs that read them.

`python -m tests.wrong_inputs.stored RUN FLAGS OUT` writes one JSON line per case to OUT: the file, the change, the
program, and its outcome: "2" (rejected with one line), "0", "torch" (accepted: torch would be imported next), the name
of the checkpoint that a resume chooses, or a problem. Each case changes one file of RUN, and restores it. With a fourth
argument "every", each field gets every wrong value.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.wrong_inputs.case import DEEP, RAW, Case, of_extensions
from tests.wrong_inputs.generated import _no_process, _NoTorch, _run

NEWEST = "checkpoints/global_step3"
MANIFEST = f"{NEWEST}/manifest.json"
# file of the run folder -> the programs that read it
READERS = {
    MANIFEST: ("list", "verify", "export", "evaluate", "resume"),
    "run.json": ("summarize", "evaluate", "export", "calibrate", "resume"),
    "metrics.jsonl": ("summarize", "calibrate", "slurm", "progress", "goodput"),
    "events.jsonl": ("slurm", "progress", "goodput", "resume"),
    "rollbacks.jsonl": ("resume", "list"),
    "slurm.jsonl": ("slurm",),
    ".run.lock": ("lock",),
    "checkpoints/latest": ("list", "resume"),
}
# name -> words of a subcommand of an extension, and the files that it reads
_OF_EXTENSIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    name: row for module in of_extensions() for name, row in getattr(module, "STORED", {}).items()}
for _name, (_, _files) in _OF_EXTENSIONS.items():
    for _file in _files:
        READERS[_file] = (*READERS[_file], _name)
VALUES = (None, -1, "x", [], {}, True, 1.5, 2**70, 10**12, [None], {"x": None})
_SKIPPED = ("environment", "software", "hardware", "code", "command")  # subtrees of run.json that tools only print
_HANGS_AFTER_S = 600
_MAX_BYTES = 2**33  # of address space: a reader that reads a huge file fails with MemoryError


def _programs(run: Path, flags: list[str]) -> dict[str, Callable[[], Any]]:
    def tool(program: str, *words: str) -> Callable[[], Any]:
        return lambda: _outcome(*_run(Case("", program, words, ""), run.parent))

    of_extensions = {name: line.format(run=run).split() for name, (line, _) in _OF_EXTENSIONS.items()}

    return {"list": tool("checkpoint list", str(run)), "verify": tool("checkpoint verify", str(run)),
            "export": tool("export", str(run), "--output", f"{run}-out"),
            "evaluate": tool("evaluate", str(run)),
            "summarize": tool("summary", str(run)),
            "calibrate": tool("compare", "--calibrate", str(run), "--model", "tiny", "--world_size", "2"),
            **{name: tool(*words) for name, words in of_extensions.items()},
            "resume": lambda: _in_process(lambda: _resume(flags)),
            "slurm": lambda: _in_process(lambda: _slurm(run)),
            "progress": lambda: _in_process(lambda: _progress(run)),
            "goodput": lambda: _in_process(lambda: _goodput(run)),
            "lock": lambda: _in_process(lambda: _lock(run))}


def _outcome(code: Any, out: str, err: str) -> str:
    if "was imported before" in err or "was started before" in err:
        return "torch"
    lines = err.splitlines()
    if "Traceback" in err or code not in (None, 0, 1, 2):
        return f"exit code {code}: {err[-1500:]}"
    if code == 2 and (len(lines) != 1 or not err.startswith("ds-pretrain: error: ") or len(err) > 2000):
        return f"not one line: {err[-1500:]}"
    return str(code or 0)


def _in_process(call: Callable[[], str]) -> str:
    from pretrain.errors import ConfigError

    try:
        return call()
    except ConfigError as error:
        return "2" if len(str(error).splitlines()) == 1 else f"not one line: {error}"
    except BaseException as error:
        import traceback

        return f"{error!r}: {traceback.format_exc()[-1500:]}"


def _resume(flags: list[str]) -> str:
    from pretrain.checkpoint.load.start import check_start
    from pretrain.config.flags.parse import parse_arguments
    from pretrain.distributed.device import cpu_device

    start = check_start(parse_arguments(flags), world_size=2, device=cpu_device())
    return "begins at step 0" if start.resume is None else start.resume.folder.name


def _slurm(run: Path) -> str:
    from pretrain.cluster.slurm_job import read_record, slowest_step_seconds

    read_record(run, "1")
    slowest_step_seconds(run)
    return "0"


def _progress(run: Path) -> str:
    from pretrain.cluster.outcome import read_progress

    progress = read_progress(run, {"events.jsonl": 0, "metrics.jsonl": 0})
    _ = progress.last_step, progress.began, progress.hang, progress.stop
    return "0"


def _goodput(run: Path) -> str:
    from pretrain.monitor.read_run_folder import Goodput

    Goodput.read(run, 3)
    return "0"


def _lock(run: Path) -> str:
    from pretrain.resilience import run_lock

    run_lock.STALE_S = run_lock.WATCH_S = 0.1
    run_lock.find_owner(run)
    with run_lock.RunLock(run, report=lambda line: None):
        return "0"


def _contents(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield contents that are no JSON of this file, and None for other kinds of files."""
    yield "unchanged", content
    yield from RAW.items()
    yield from (("not UTF-8", b"\xff\xfe" + content), ("cut", content[:len(content) // 2]), ("null", b"null"),
                ("deep list", b"[" * DEEP + b"]" * DEEP), ("deep lines", content + b"\n" + b"[" * DEEP))
    yield from ((kind, None) for kind in KINDS)


def _wrong_values(file: str, content: bytes, *, every: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the file with a wrong value of each field: with one of VALUES, or with every one."""
    is_lines = file.endswith(".jsonl") or file == ".run.lock"
    if file == "checkpoints/latest":
        return
    values = [json.loads(line) for line in content.splitlines()] if is_lines else json.loads(content)
    counter = itertools.count()
    for path in _paths(values):
        for wrong in VALUES if every else [VALUES[next(counter) % len(VALUES)]]:
            changed = _with(values, path, wrong)
            text = "\n".join(map(json.dumps, changed)) + "\n" if is_lines else json.dumps(changed, indent=1)
            yield f"{'.'.join(map(str, path))} = {json.dumps(wrong)}", _sealed(file, text).encode()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value: of at most two items of a list, and four of an object without fixed keys."""
    if path:
        yield path
    if isinstance(value, dict) and not (path and path[-1] in _SKIPPED):
        names = list(value)[:4] if path[-1:] == ("files",) else value
        for name in names:
            yield from _paths(value[name], (*path, name))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from _paths(value[index], (*path, index))


def _with(values: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """Return a copy of `values` with another value at a path."""
    if not path:
        return wrong
    copied = list(values) if isinstance(values, list) else dict(values)
    copied[path[0]] = _with(values[path[0]], path[1:], wrong)
    return copied


def _sealed(file: str, text: str) -> str:
    """Return the text with right checksums, as somebody who knows the format would write it."""
    if file != MANIFEST:
        return text
    from pretrain.checkpoint.format.manifest import _with_hash

    return _with_hash({key: value for key, value in json.loads(text).items() if key != "sha256"})


def _write_kind(path: Path, kind: str) -> None:
    """Put something else than a regular file at a path."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**40)


UNLIMITED = ("metrics.jsonl", "events.jsonl", "slurm.jsonl")  # rows are read one after the other
KINDS = ("FIFO", "folder", "link to a device", "huge", "missing")


def _hangs(*_: Any) -> None:
    raise AssertionError(f"no end within {_HANGS_AFTER_S} s")


def main(run: Path, flags: list[str], out: Path, every: bool) -> None:
    sys.meta_path.insert(0, _NoTorch())
    subprocess.Popen.__init__ = _no_process  # type: ignore[method-assign,assignment]
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    signal.signal(signal.SIGALRM, _hangs)
    signal.signal(signal.SIGPROF, _hangs)
    os.environ["DS_ACCELERATOR"] = "cpu"
    programs = _programs(run, flags)
    with open(out, "w", encoding="utf-8") as results:
        for file, readers in READERS.items():
            path = run / file
            content = path.read_bytes()
            one = itertools.cycle(readers)
            cases = [(name, change, readers) for name, change in _contents(content)
                     if name != "huge" or file not in UNLIMITED]
            cases += [(name, change, ("resume",) if file == MANIFEST else (next(one),))
                      for name, change in _wrong_values(file, content, every=every)]
            for name, change, chosen in cases:
                for program in chosen:
                    _remove(path)
                    if change is None:
                        _write_kind(path, name)
                    else:
                        path.write_bytes(change)
                    signal.alarm(_HANGS_AFTER_S)
                    outcome = programs[program]()
                    signal.alarm(0)
                    results.write(json.dumps([file, name, program, outcome]) + "\n")
            _remove(path)
            path.write_bytes(content)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]), every=sys.argv[4:] == ["every"])
