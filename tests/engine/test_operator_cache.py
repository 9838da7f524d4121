"""All environments with the same versions share one compilation of an operator, even after a killed compilation."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from pretrain.engine import operator_cache
from pretrain.errors import ConfigError
from tests.support.launch import ROOT

# The file is toy.cc, not toy.cpp, because .cpp sources get torch's headers, which take seconds to compile.
TOY = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "toy", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_toy(void) { return PyModule_Create(&module); }
"""
LOAD = """
import os, sys
from pretrain.engine.operator_cache import _load
os.environ["BUILDER"] = str(os.getpid())
_load("toy", sys.argv[1:])
print("loaded")
"""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test its own cache, and this environment's ninja."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def _source(folder: Path, text: str = TOY) -> str:
    folder.mkdir()
    (folder / "toy.cc").write_text(text)
    return str(folder / "toy.cc")


def _compiler(folder: Path, first: str = "") -> str:
    """Return a compiler that counts the compilations of toy.cc in FOLDER/count, runs `first`, and then compiles."""
    script = folder / "c++"
    script.write_text(textwrap.dedent(f"""\
        #!/bin/bash
        case "$*" in *toy.cc*) echo >> {folder}/count; {first or ':'} ;; esac
        exec {shutil.which('c++')} "$@"
        """))
    script.chmod(0o755)
    return str(script)


def _start(source: str, **environ: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", LOAD, source], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**os.environ, **environ})


def test_killed_and_simultaneous_compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed compilation does not block later ones. Of two simultaneous processes only one compiles.

    A later process with the same sources in another folder, as in another environment, loads the same library.
    """
    here, elsewhere = _source(tmp_path / "here"), _source(tmp_path / "elsewhere")
    killer = _compiler(tmp_path, "kill -9 $BUILDER; exit 1")
    assert _start(here, CXX=killer).wait(timeout=300) == -9
    cache = tmp_path / "cache"
    assert list(cache.glob("deepspeed_toy_*/lock")), "a killed compilation must leave torch's lock file"

    counting = _compiler(tmp_path)
    (tmp_path / "count").unlink()
    both = [_start(here, CXX=counting), _start(here, CXX=counting)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [out for out, _ in outputs] == ["loaded\n", "loaded\n"], outputs
    messages = "".join(err for _, err in outputs)
    assert messages.count("compiling DeepSpeed's toy, once for this machine: 0 s\n") == 1
    assert messages.count("DeepSpeed's operator toy: compiled in ") == 1
    monkeypatch.setenv("CXX", counting)
    assert operator_cache._load("toy", [elsewhere]).__name__ == "toy"
    assert (tmp_path / "count").read_text() == "\n"
    assert len(list(cache.iterdir())) == 1


def test_the_fingerprint_covers_sources_flags_and_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _source(tmp_path / "here")
    settings = {"extra_cflags": ["-O3"], "extra_include_paths": ["/somewhere"]}
    first = operator_cache._fingerprint("toy", [source], settings)
    assert operator_cache._fingerprint("toy", [source], {**settings, "extra_include_paths": ["/else"]}) == first
    others = {operator_cache._fingerprint("toy", [source], {"extra_cflags": ["-O2"]}),
              operator_cache._fingerprint("toy", [_source(tmp_path / "edited", TOY + "\n")], settings)}
    with monkeypatch.context() as patch:
        patch.setattr(operator_cache, "cpu_features", lambda: "flags : sse2")
        others.add(operator_cache._fingerprint("toy", [source], settings))
    assert len(others - {first}) == 3


def test_a_failed_compilation_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"operator toy: it does not compile: .*error: .*build\.log"):
        operator_cache._load("toy", [_source(tmp_path / "wrong", "#include <Python.h>\nno C++")])
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(ConfigError, match=r"without a C\+\+ compiler .*apt-get install g"):
        operator_cache._load("toy", [_source(tmp_path / "right")])
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file/cache"))
    with pytest.raises(ConfigError, match=r"Not a directory.*TORCH_EXTENSIONS_DIR"):
        operator_cache._load("toy", [_source(tmp_path / "again")])


def test_plain_torch_waits_forever_for_a_killed_build(tmp_path: Path) -> None:
    """This test fails once torch has fixed the defect. Then `process_lock` is no longer needed."""
    (tmp_path / "lock").touch()  # a killed process leaves it
    baton = FileBaton(str(tmp_path / "lock"), wait_seconds=0.05)
    assert not baton.try_acquire()
    waiting = threading.Thread(target=baton.wait, daemon=True)
    waiting.start()
    waiting.join(timeout=1)
    assert waiting.is_alive()
    (tmp_path / "lock").unlink()
    waiting.join()


def test_deepspeeds_operators_compile_as_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set-up has compiled each operator as one file. Otherwise one_file.log has the errors of this attempt.

    Such an operator was compiled in DeepSpeed's way, because torch's headers or DeepSpeed's sources have changed.
    """
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    code = """
        from pretrain.distributed.device import detect_device
        from pretrain.engine.prepare import prepare_deepspeed
        prepare_deepspeed(detect_device())
        from deepspeed.accelerator import get_accelerator
        for name in ("FusedAdam", "ShareMemComm", "CPUAdam", "CPULion", "AsyncIO"):
            builder = get_accelerator().create_op_builder(name + "Builder")
            if builder is not None and builder.is_compatible(verbose=False):
                print("FOUND", builder.load(verbose=False).__file__)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    libraries = [Path(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(libraries) >= 4, done.stderr
    for library in libraries:
        assert (library.parent / "built").read_text() == library.stem
        assert not (library.parent / "one_file.log").exists(), (library.parent / "one_file.log").read_text()
