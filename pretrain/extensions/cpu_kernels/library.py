"""Compile the C files of this folder for this CPU at first use, and call their functions.

The files are plain C, because torch's headers alone take most of a minute to compile. Its OpenMP calls use the library
that torch has loaded, and therefore torch's threads.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from pretrain.distributed.device import cpu_features

_FOLDER = Path(__file__).parent
_FLAGS = ("-O3", "-ffast-math", "-fno-finite-math-only", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
# gcc's flags for the features in /proc/cpuinfo on which the speed of the kernels depends
_X86_FLAGS = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c", "avx512f": "-mavx512f", "avx512bw": "-mavx512bw",
              "avx512dq": "-mavx512dq", "avx512vl": "-mavx512vl", "avx512_bf16": "-mavx512bf16"}


_PLAIN = frozenset((int, float, bool, type(None)))  # arguments that are no tensors; isinstance takes longer


class _Simulated:
    """Holds the type of the tensors of a simulation, which have no memory; None: C functions are called."""

    tensor_type: type[torch.Tensor] | None = None


def is_real(x: torch.Tensor) -> bool:
    """Return whether a tensor is on a CPU and has memory, or is one of a simulation.

    Subclasses of tensors are excluded, because they may have no memory (torch's FakeTensor).
    """
    return type(x) is (_Simulated.tensor_type or torch.Tensor) and x.device.type == "cpu"


def call(name: str, *arguments: torch.Tensor | int | float | None) -> None:
    """Call a C function: a tensor is passed as a pointer to its first element, None as NULL, numbers as int64 or float.

    The library must exist (`has_library`). The tensors must have the memory layout that the function expects. While
    torch.profiler is active, it records the function as `c::NAME` with the shapes of the tensors.
    """
    if _Simulated.tensor_type is not None:
        return
    library = _library()
    assert library is not None
    function = getattr(library, name)
    if function.argtypes is None:  # ctypes then converts numbers itself, at a third of the time
        function.argtypes, function.restype = [*map(_c_type, arguments)], None
    values = [x if type(x) in _PLAIN else x.data_ptr() for x in arguments]  # type: ignore[union-attr]
    if not torch.autograd.profiler._is_profiler_enabled:
        function(*values)
        return
    with torch._C._profiler._RecordFunctionFast(f"c::{name}", list(arguments)):
        function(*values)


def simulate_calls(tensor_type: type[torch.Tensor]) -> None:
    """Accept tensors of this type only, and let `call` do nothing: operators allocate the same memory as with C."""
    _Simulated.tensor_type = tensor_type


def _c_type(argument: torch.Tensor | int | float | None) -> type:
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_int64 if isinstance(argument, int) else ctypes.c_float


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Load the library. Return None if it cannot be compiled or loaded; torch's operators are used then."""
    try:
        path = _compile()
        if path is None:
            return None
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # the file may be damaged
            return ctypes.CDLL(str(_compile(again=True)))
    except (OSError, RuntimeError, subprocess.SubprocessError, ValueError):  # RuntimeError: no home folder
        return None


def has_library() -> bool:
    """Return whether the C functions are compiled, or can be compiled. The first call compiles them."""
    return _library() is not None


def library_folder() -> Path:
    """Return the folder of the library, in which the choice for this CPU is cached too."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


def library_name() -> str:
    """Return the name of the library's file: a hash of sources, flags, compiler and CPU.

    Hosts that share a home folder may have different CPUs. The name is "" without a compiler.
    """
    compiler = _compiler()
    sources = (path.read_text(encoding="utf-8") for path in (*_sources(), *sorted(_FOLDER.glob("*.h"))))
    inputs = [*sources, *_FLAGS, *compiler, cpu_features()]
    return f"ds_pretrain_{hashlib.sha256('|'.join(inputs).encode()).hexdigest()[:16]}.so" if compiler else ""


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.c"))


def _compiler() -> list[str]:
    """Return the command of the C compiler: the variable CC, or the first one that is installed; else []."""
    for words in ([shlex.split(os.environ["CC"])] if os.environ.get("CC") else [[name] for name in _COMPILERS]):
        path = shutil.which(words[0]) if words else None
        if path is not None:
            return [path, *words[1:]]
    return []


def _compile(*, again: bool = False) -> Path | None:
    """Compile the library unless it exists, or `again`, and return its path; None without a compiler.

    Raises the error of the last attempt if the compiler accepts none of the sets of flags.
    """
    name, root, compiler = library_name(), library_folder(), _compiler()
    if not name:
        return None
    library = root / name
    if library.exists() and not again:
        return library
    root.mkdir(parents=True, exist_ok=True)
    failure: subprocess.SubprocessError | None = None
    with tempfile.TemporaryDirectory(dir=root) as folder:  # other ranks may compile it at the same time
        compiled = Path(folder, name)
        for flags in _cpu_flags():
            try:
                subprocess.run([*compiler, *_FLAGS, *flags, *map(str, _sources()), "-o", str(compiled), "-lm"],
                               check=True, capture_output=True, timeout=120)
            except subprocess.SubprocessError as error:
                failure = error
                continue
            with compiled.open("rb") as file:
                os.fsync(file.fileno())  # after a power failure the file is complete, or does not exist
            compiled.replace(library)
            return library
    assert failure is not None
    raise failure


def _cpu_flags() -> list[tuple[str, ...]]:
    """Return sets of flags, the fastest first. A compiler may not know a flag, or not know what "native" means."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [("-mcpu=native", "-fopenmp"), ("-march=native", "-fopenmp"), ("-fopenmp",), ()]
    features = set(cpu_features().replace(":", " ").split())
    known = tuple(flag for feature, flag in _X86_FLAGS.items() if feature in features)
    return [("-march=native", "-mprefer-vector-width=512", "-fopenmp"), ("-march=native", "-fopenmp"),
            (*known, "-fopenmp"), (*(flag for flag in known if "512" not in flag), "-fopenmp"), ("-fopenmp",), ()]
