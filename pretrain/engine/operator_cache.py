"""Compile DeepSpeed's operators quickly, and share them between all environments that can load them.

DeepSpeed 0.19.8 compiles an operator at its first use (ops/op_builder/builder.py, `OpBuilder.jit_load`) with
`torch.utils.cpp_extension.load` of torch 2.13. This function has three problems, and `cache_operators` replaces it:

- Each source file (twelve for async_io) parses all of torch's C++ headers, with `-g`. Here one file includes the
  sources of an operator. It is compiled without `-g` and without the headers of the C++ frontend (`torch/all.h`), which
  no operator uses: `torch/extension.h` skips them for TORCH_INDUCTOR_CPP_WRAPPER. The other flags (`-O3
  -march=native`) are the same.
- Operators are compiled again when the path of the environment, of the checkout or of ninja changes. They are not
  compiled again when the CPU changes: a host that shares its home folder with another one may die with SIGILL. Here the
  folder's name contains a hash of everything that the library depends on.
- A run that is killed during a compilation leaves a lock file (torch/utils/file_baton.py), for which every later start
  waits forever. Here the lock is released when the process ends.

Measured on two idle cores (Xeon with AMX, gcc 12, November 2026): `python -m pretrain.engine.build_ops` takes
24 s for the two operators of the quickstart, and 57 s with `--offload` for all five. torch's `load` takes 437 s of
CPU time for the five without `-g`, and more with `-g`. FusedAdam and CPUAdam give the same bits either way.

If an operator does not compile as one file, torch's `load` compiles it. `tests/engine/test_operator_cache.py` fails if
this fallback is used for an operator of `launch/setup.sh`. It also fails once torch no longer waits for dead processes.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils.cpp_extension

from pretrain.distributed.device import cpu_features
from pretrain.errors import ConfigError
from pretrain.terminal import is_watched

_TORCH_LOAD = torch.utils.cpp_extension.load
# Static variables that two sources of one operator declare with the same name (csrc/cpu/comm, csrc/aio).
_CLASHING_STATICS = ("c_block_size", "c_io_queue_depth", "c_library_name", "is_initialized", "world_rank", "world_size")
_LOG_INTERVAL_S = 60.0


def cache_operators() -> None:
    """Make DeepSpeed load its operators with `_load`. Call this before DeepSpeed loads an operator."""
    torch.utils.cpp_extension.load = _load  # type: ignore[assignment]


class NotCompiledError(Exception):
    """An operator is not in the cache."""


def load_only_compiled() -> None:
    """Make DeepSpeed load an operator only from the cache, in a process that compiles none.

    DeepSpeed's `load` of an operator that is not in the cache then raises NotCompiledError.
    """
    torch.utils.cpp_extension.load = _load_compiled  # type: ignore[assignment]


def _load_compiled(name: str, sources: list[str], **settings: Any) -> ModuleType:
    module = _import_built(_folder(name, sources, settings))
    if module is None:
        raise NotCompiledError(name)
    return module


def cache_folder() -> Path:
    """Return torch's folder of compiled extensions; the folders of operators begin with `deepspeed_`."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or torch.utils.cpp_extension.get_default_build_root())


def _load(name: str, sources: list[str], **settings: Any) -> ModuleType:
    """Replace `torch.utils.cpp_extension.load`, for the arguments that DeepSpeed uses."""
    folder = _folder(name, sources, settings)
    module = _import_built(folder)
    if module is not None:
        return module
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "process_lock").open("w")
    except OSError as error:
        raise ConfigError(str(cache_folder()), problem=f"compiled operators cannot be written here: {error.strerror}",
                          remedy="choose another folder with TORCH_EXTENSIONS_DIR") from None
    with lock:  # the lock is released when the file is closed or the process ends
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)  # torch's lock, left by a killed process
        return _import_built(folder) or _build(name, sources, settings, folder)


def _folder(name: str, sources: list[str], settings: dict[str, Any]) -> Path:
    return cache_folder() / f"deepspeed_{name.removeprefix('deepspeed_')}_{_fingerprint(name, sources, settings)}"


def _import_built(folder: Path) -> ModuleType | None:
    """Load the operator from its folder. Return None if it is not compiled or cannot be loaded."""
    try:
        name = (folder / "built").read_text(encoding="utf-8")
    except OSError:
        return None
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so") if name else None
    if spec is None or spec.loader is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:  # a library that the operator needs is missing: compile it again
        return None
    return module


def _build(name: str, sources: list[str], settings: dict[str, Any], folder: Path) -> ModuleType:
    compiler = torch.utils.cpp_extension.get_cxx_compiler()
    if shutil.which((shlex.split(compiler) or [""])[0]) is None:  # CXX may be `ccache g++`
        raise ConfigError(f"DeepSpeed's operator {name}",
                          problem=f"it cannot be compiled without a C++ compiler ({compiler})",
                          remedy="sudo apt-get install g++")
    settings = {**settings, "build_directory": str(folder)}
    with _announced(name):
        module = _build_as_one_file(name, sources, settings, folder) or _build_as_deepspeed(
            name, sources, settings, folder)
    (folder / "built").write_text(module.__name__, encoding="utf-8")
    return module


def _build_as_one_file(name: str, sources: list[str], settings: dict[str, Any], folder: Path) -> ModuleType | None:
    """Compile all sources as one file. Returns None for CUDA sources, and if the compilation fails."""
    if not _is_cpp(sources):
        return None
    # Not all headers have include guards; GCC's #import includes each header once.
    headers = sorted({header for source in sources for header in Path(source).parent.glob("*.h")})
    lines = ["#include <torch/extension.h>", *(f'#import "{header}"' for header in headers)]
    for number, source in enumerate(sources):
        for static in _CLASHING_STATICS if number else ():
            lines += [f"#undef {static}", f"#define {static} {static}_{number}"]
        lines.append(f'#include "{source}"')
    one_file = folder / f"{name}_one_file.cpp"
    one_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = [flag for flag in settings.get("extra_cflags") or [] if flag != "-g"]
    settings = {**settings, "extra_cflags": [*flags, "-DTORCH_INDUCTOR_CPP_WRAPPER"]}
    try:
        return _TORCH_LOAD(name, sources=[str(one_file)], **settings)
    except (RuntimeError, ImportError) as error:
        (folder / "one_file.log").write_text(str(error), encoding="utf-8")
        return None


def _build_as_deepspeed(name: str, sources: list[str], settings: dict[str, Any], folder: Path) -> ModuleType:
    try:
        return _TORCH_LOAD(name, sources=sources, **settings)
    except (RuntimeError, ImportError) as error:
        log = folder / "build.log"
        log.write_text(str(error), encoding="utf-8")
        lines = str(error).splitlines()
        first = next((line for line in lines if "error:" in line or "Error:" in line), lines[-1])
        raise ConfigError(f"DeepSpeed's operator {name}", problem=f"it does not compile: {first.strip()}",
                          remedy=f"The compiler's messages are in {log}") from None


def _is_cpp(sources: list[str]) -> bool:
    return all(source.endswith(".cpp") for source in sources)


def _fingerprint(name: str, sources: list[str], settings: dict[str, Any]) -> str:
    """Return a hash of sources, flags, versions and CPU features.

    Paths and the compiler are not part of the hash, so that a machine without a compiler can use a library that another
    machine has compiled.
    """
    # While DeepSpeed builds for CUDA, it sets this variable for all threads: ignore it for C++.
    cuda_architectures = None if _is_cpp(sources) else os.environ.get("TORCH_CUDA_ARCH_LIST")
    flags = [settings.get(key) for key in ("extra_cflags", "extra_cuda_cflags", "extra_ldflags")]
    parts = [name, importlib.metadata.version("deepspeed"), torch.__version__, sysconfig.get_config_var("SOABI"),
             platform.libc_ver(), cpu_features(), flags, cuda_architectures,
             [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources]]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


_started_at: dict[str, float] = {}  # operator -> start of its compilation in this process (time.monotonic)
_changed = threading.Condition()


@contextlib.contextmanager
def _announced(name: str) -> Iterator[None]:
    """Report a compilation: a terminal shows a line that counts seconds, a log gets one line per minute."""
    with _changed:
        if not _started_at:
            threading.Thread(target=_report, daemon=True).start()
        _started_at[name] = time.monotonic()
    built = False
    try:
        yield
        built = True
    finally:
        with _changed:
            seconds = time.monotonic() - _started_at.pop(name)
            _changed.notify_all()
            end = f"ds-pretrain: DeepSpeed's operator {name}: compiled in {seconds:.0f} s" if built else ""
            print(_line_start() + end, end="\n" if built else "", file=sys.stderr, flush=True)


def _line_start() -> str:
    return "\r\033[K" if is_watched(sys.stderr) else ""


def _report() -> None:
    with _changed:
        while _started_at:
            terminal = is_watched(sys.stderr)
            seconds = time.monotonic() - min(_started_at.values())
            names = ", ".join(_started_at)
            line = f"ds-pretrain: compiling DeepSpeed's {names}, once for this machine: {seconds:.0f} s"
            print(_line_start() + line, end="" if terminal else "\n", file=sys.stderr, flush=True)
            _changed.wait(1 if terminal else _LOG_INTERVAL_S)
