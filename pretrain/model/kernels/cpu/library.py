"""Compile the C files of this folder for this CPU at first use, and call their functions.

The files are plain C, because torch's headers alone take most of a minute to compile. Its OpenMP calls use the library
that torch has loaded, and therefore torch's threads.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-fno-finite-math-only", "-fopenmp",
          "-shared", "-fPIC")


def has_kernels(x: torch.Tensor) -> bool:
    """Return whether the C functions accept this tensor: bf16, on a CPU, on a machine with a C compiler.

    Subclasses of tensors are excluded, because they may have no memory (torch's FakeTensor). torch.compile is excluded,
    because it cannot trace C.
    """
    return (type(x) is torch.Tensor and x.device.type == "cpu" and x.dtype == torch.bfloat16
            and not torch.compiler.is_compiling() and _library() is not None)


def call(name: str, *arguments: torch.Tensor | int | float | None) -> None:
    """Call a C function: a tensor is passed as a pointer to its first element, None as NULL, numbers as int64 or float.

    The library must exist (`has_kernels`). The tensors must have the memory layout that the function expects.
    """
    library = _library()
    assert library is not None
    getattr(library, name)(*map(_as_c, arguments))


def _as_c(argument: torch.Tensor | int | float | None) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_float(argument)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Load the library. Return None if it cannot be compiled or loaded; torch's operators are used then."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compile(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str) -> Path:
    """Compile the library unless it exists, and return its path.

    The name contains a hash of sources, flags, compiler and CPU, because hosts that share a home folder may have
    different CPUs.
    """
    sources = sorted(_FOLDER.glob("*.c"))
    inputs = [*(path.read_text(encoding="utf-8") for path in (*sources, *sorted(_FOLDER.glob("*.h")))), *_FLAGS,
              compiler, cpu_features()]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    library = root / f"ds_pretrain_{hashlib.sha256('|'.join(inputs).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:  # other ranks may compile it at the same time
            compiled = Path(folder, library.name)
            subprocess.run([compiler, *_FLAGS, *map(str, sources), "-o", str(compiled), "-lm"], check=True,
                           capture_output=True, timeout=120)
            compiled.replace(library)
    return library


def cpu_features() -> str:
    """Return the CPU's instruction sets, on which the code of -march=native depends."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
