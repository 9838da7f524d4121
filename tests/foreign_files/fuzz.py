"""Commands on hostile copies of foreign files, in a sandbox.

`python -m tests.foreign_files.fuzz WORLD OUT SEED COUNT [FOLDER ...]` runs them all in this process: COUNT copies of
each file of these folders, or of all. It writes one JSON line for each: the name, the exit code, and what is wrong: a
traceback, something that the sandbox does not allow, a changed file of somebody else, or foreign text that acts in
HTML, YAML, a terminal or a script.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.monitor.repeatable import NEVER_REPEATED
from tests.foreign_files.commands import FILES, NUM_NAMES, PICKLES, PLACES, World, commands
from tests.foreign_files.payloads import MARK, MODULE, dumped, escapes, hostile_copies, html_of, named_places, payloads
from tests.foreign_files.sandbox import Sandbox, Tree, install

SECRET = "content of a file of the victim"
_HANGS_AFTER_S = 120
_MAX_BYTES = 2**35  # of address space
_LINKS = ("{victim}/secret.txt", "/dev/zero", "/etc/passwd", "{victim}/folder", "{victim}/none")
_ACTING = ("output_path", "output_file", "job_name", "team", "nvme_path", "workspace", "api_key")


class Fuzzer:
    """Runs the commands, and looks at what they leave behind."""

    def __init__(self, world: World, sandbox: Sandbox, results: Any) -> None:
        self.world, self._sandbox, self._results = world, sandbox, results
        self._log = world.folder / "log"
        self._commands = commands(world)
        self._others = Tree(world.victim, world.here, world.home, world.own)
        self.texts = payloads(world.victim)
        self._streams = [open(world.folder / f"stream{number}", "w+b") for number in (1, 2)]  # noqa: SIM115

    def run(self, folder: str, name: str, command: str) -> None:
        """Run a command, and write its result."""
        shutil.rmtree(self.world.out, ignore_errors=True)
        self.world.out.mkdir()
        code, out, err = self._call(self._commands[folder][command])
        problems = [*self._outside(), *_of_output(code, out, err), *self._of_files()]
        if command == "command" and code == 0:
            problems += self._of_script(out)
        self._results.write(json.dumps([folder, name, command, code, problems]) + "\n")
        self._results.flush()

    def _call(self, words: list[str]) -> tuple[Any, str, str]:
        """Call ds-pretrain with the words. Returns its exit code, and what it has written to stdout and stderr."""
        from pretrain.__main__ import main
        from pretrain.cli import run_main

        environ, kept = dict(os.environ), [os.dup(number) for number in (1, 2)]
        code: Any = None
        for number, stream in zip((1, 2), self._streams, strict=True):
            stream.seek(0)
            stream.truncate()
            os.dup2(stream.fileno(), number)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False)))
                                  for number in (1, 2))
        sys.argv = ["ds-pretrain", *words]
        signal.alarm(_HANGS_AFTER_S)
        self._sandbox.is_on = True
        try:
            run_main(main)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        self._sandbox.is_on = False
        signal.alarm(0)
        for number, descriptor in zip((1, 2), kept, strict=True):
            with contextlib.suppress(Exception):
                (sys.stdout if number == 1 else sys.stderr).flush()
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(self.world.here)
        out, err = (Path(stream.name).read_bytes().decode(errors="surrogateescape") for stream in self._streams)
        return code, out, err

    def _outside(self) -> list[str]:
        """Return what the sandbox has recorded, and the changed files of others."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        found = [": ".join(map(str, json.loads(line)[:2])) for line in dict.fromkeys(lines)]
        return [*found, *(f"changed: {path}" for path in self._others.changes())]

    def _of_files(self) -> Iterator[str]:
        """Look at what the command has written."""
        for path in sorted(self.world.out.rglob("*")):
            if path.is_symlink():
                yield f"a link: {path} -> {os.readlink(path)}"
            if not path.is_file() or path.stat().st_size > 2**24:
                continue
            content = path.read_bytes()
            if path.suffix != ".html" and (SECRET.encode() in content or b"root:x:0" in content):
                yield f"another file's content is in {path}"
            text = content.decode(errors="replace")
            if path.suffix == ".html" and (found := html_of(text)):
                yield f"HTML in {path}: {found}"
            if path.suffix == ".yaml":
                yield from _of_yaml(path, text)
            if path.name == "ds_config.json":
                yield from _of_config(path, json.loads(text))

    def _of_script(self, script: str) -> list[str]:
        """Run a script that a command prints as its user might, with a ds-pretrain that does nothing."""
        environ = {"PATH": f"{self.world.data}/bin:/usr/bin:/bin", "HOME": str(self.world.home), "HOSTFILE": "hosts"}
        with open(os.devnull, "w") as nowhere:
            subprocess.run(["sh", "-s", f"{self.world.out}/repeated"], input=script, text=True, cwd=self.world.here,
                           env=environ, stdout=nowhere, stderr=nowhere, check=False)
        found = [*self._outside(), *self._of_files()]
        path = self.world.out / "repeated-files" / "run.yaml"
        return found + (list(_of_yaml(path, path.read_text())) if path.is_file() else [])


def _of_output(code: Any, out: str, err: str) -> Iterator[str]:
    if "Traceback" in err or code not in (0, 1, 2, None) or code is None:
        yield f"exit code {code}: {err[-2500:]}"
    errors = [line for line in err.splitlines() if line.startswith("ds-pretrain: error: ")]
    if code == 2 and (len(errors) != 1 or len(errors[0]) > 4000):
        yield f"not one line: {err[-1500:]}"
    for text in (out, err):
        if found := escapes(text.replace("\t", " ").replace("\x1b[K", "").replace("\r", "")):
            yield f"{found} in the output"


def _of_yaml(path: Path, text: str) -> Iterator[str]:
    for name, value in (yaml.safe_load(text) or {}).items():
        if name in NEVER_REPEATED and any(part in str(value) for part in (MARK, MODULE, "foreign")):
            yield f"{path}: {name}: {value!r:.100}"


def _of_config(path: Path, value: Any, where: str = "") -> Iterator[str]:
    for name, each in value.items() if isinstance(value, dict) else ():
        if name in _ACTING and isinstance(each, str):
            yield f"{path}: {where}{name}: {each!r:.100}"
        yield from _of_config(path, each, f"{where}{name}.")


def _content(name: str, value: Any) -> str:
    """Return the text of a file with this value: with a right checksum, as somebody who knows the format would."""
    if Path(name).name == MANIFEST and isinstance(value, dict):
        from pretrain.checkpoint.format.manifest import _with_hash

        with contextlib.suppress(Exception):
            return _with_hash({key: each for key, each in value.items() if key != "sha256"})
    return value if isinstance(value, str) else dumped(name, value)


def _values(name: str, content: bytes) -> Any:
    if name.endswith("jsonl"):
        return [json.loads(line) for line in content.splitlines()]
    with contextlib.suppress(ValueError):
        return json.loads(content)
    return [content.decode()]


def _texts(fuzzer: Fuzzer, folder: str, numbers: random.Random, count: int) -> None:
    """Make values of the JSON files of a folder hostile."""
    base = fuzzer.world.base(folder)
    for file, readers in FILES[folder].items():
        path, names = base / file, list(readers or commands(fuzzer.world)[folder])
        if not path.is_file():
            assert folder != "run", f"{path} is missing"
            continue
        content = path.read_bytes()
        for number, (name, value) in enumerate(hostile_copies(_values(file, content), fuzzer.texts, numbers, count)):
            is_text = isinstance(value, list) and value and isinstance(value[0], str) and not file.endswith("jsonl")
            text = value[0] if is_text else _content(file, value)
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
            for command in [names[number % len(names)], numbers.choice(names)][:1 + (count > 20)]:
                fuzzer.run(folder, f"{file} {name}", command)
        path.write_bytes(content)


def _places(fuzzer: Fuzzer, numbers: random.Random, count: int) -> None:
    """Let run.json name files, hosts and modules, one of them at a time, for each command."""
    path = fuzzer.world.run / "run.json"
    content = path.read_bytes()
    for command in commands(fuzzer.world)["run"]:
        for name, value in named_places(json.loads(content), PLACES, fuzzer.texts[-NUM_NAMES:], numbers, count):
            path.write_text(json.dumps(value, indent=1), encoding="utf-8")
            fuzzer.run("run", f"run.json {name}", command)
    path.write_bytes(content)


def _links(fuzzer: Fuzzer, folder: str, numbers: random.Random, count: int) -> None:
    """Replace files of a folder by links."""
    base = fuzzer.world.base(folder)
    for file, readers in FILES[folder].items():
        path, names = base / file, list(readers or commands(fuzzer.world)[folder])
        content = path.read_bytes() if path.is_file() else None
        for target in numbers.sample(_LINKS, min(count, len(_LINKS))):
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target.format(victim=fuzzer.world.victim))
            fuzzer.run(folder, f"{file} -> {target}", numbers.choice(names))
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)


def _pickles(fuzzer: Fuzzer, folder: str, numbers: random.Random, count: int) -> None:
    """Make texts in files of torch hostile."""
    import torch

    for file in PICKLES[folder]:
        path = getattr(fuzzer.world, folder) / file
        content = path.read_bytes()
        value = torch.load(io.BytesIO(content), weights_only=False)
        if not isinstance(value, dict):
            continue
        plain = {key: each for key, each in value.items() if isinstance(each, (str, int, float, dict))}
        for name, copy in hostile_copies(plain, fuzzer.texts, numbers, count):
            torch.save({**value, **copy}, path)
            fuzzer.run(folder, f"{file} {name}", "import")
        path.write_bytes(content)


def main(folder: str, out: str, seed: str, count: str, *only: str) -> None:
    world, numbers = World(Path(folder)), random.Random(int(seed))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    signal.signal(signal.SIGALRM, _hangs)
    tempfile.tempdir = str(world.tmp)
    os.chdir(world.here)
    sandbox = install()
    sandbox.is_on = False
    with open(out, "w", encoding="utf-8") as results:
        fuzzer = Fuzzer(world, sandbox, results)
        for name in only or FILES:
            if world.base(name).is_dir():
                for command in commands(world)[name]:
                    fuzzer.run(name, "unchanged", command)
                _texts(fuzzer, name, numbers, int(count))
                _links(fuzzer, name, numbers, max(1, int(count) // 8))
                if name == "run":
                    _places(fuzzer, numbers, int(count))
                if name in PICKLES:
                    _pickles(fuzzer, name, numbers, int(count))


def _hangs(*_: Any) -> None:
    raise AssertionError(f"no end within {_HANGS_AFTER_S} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
