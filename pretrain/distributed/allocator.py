"""Keep freed memory in the process, on CPUs.

glibc returns large freed blocks to the kernel, so the temporaries of each step are mapped, zeroed and faulted in again,
page by page. If jemalloc is installed, it replaces glibc's malloc and is set to return nothing. Otherwise glibc's heap
is set not to shrink; this heap fragments more. Measured with a model of 34 M parameters (8 x 512 tokens, bf16, ZeRO-1)
on 2 AVX512_BF16 cores: the peak is 1.22 GB with jemalloc and 1.45 to 1.64 GB with glibc, at the same speed.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pretrain.distributed.device import wants_cpu

_JEMALLOC = "libjemalloc.so.2"
_USER_SETTINGS = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD"}
# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1  # bytes; mallopt takes an int


def restart_with_jemalloc() -> None:
    """Restart this program with jemalloc instead of glibc's malloc, under the same process id.

    Does nothing if the program trains on a GPU, if `jemalloc_environment` is empty, or if the process was not started
    as `python PROGRAM` (for example with -m, or by fork). Call it before slow imports: then a restart takes 0.1 s.
    """
    values = jemalloc_environment(os.environ) if wants_cpu() else {}
    if values and sys.argv[0] in sys.orig_argv:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **values})


def jemalloc_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that preload jemalloc, from this Python's prefix or from the system's libraries.

    Empty if jemalloc is not installed, or if the user has set MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ (see mallopt(3))
    or LD_PRELOAD. A MALLOC_CONF of the user is kept.
    """
    if sys.platform != "linux" or _USER_SETTINGS & environ.keys():
        return {}
    library = next((name for name in (str(Path(sys.prefix, "lib", _JEMALLOC)), _JEMALLOC) if _loads(name)), None)
    if library is None:
        return {}
    return {"LD_PRELOAD": library,
            "MALLOC_CONF": environ.get("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1")}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return "static TLS" in str(error)  # too late for this process, but it can be preloaded
    return True


def keep_freed_memory() -> bool:
    """Make glibc's malloc use a heap that never shrinks, for the rest of this process.

    Returns False and does nothing if malloc is not glibc's, or if the user has configured malloc (see
    `jemalloc_environment`).
    """
    if _USER_SETTINGS & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))
