"""Memory, allocator and exit of this process, and ports for its child processes."""

import atexit
import contextlib
import ctypes
import errno
import gc
import os
import random
import resource
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from pretrain.distributed.device import wants_cpu
from pretrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "pretrain" / "__main__.py")  # `ds-pretrain`, for the Python of this process
_FIRST_FREE_PORT = 1024  # lower ports are reserved
_ENOUGH_PORTS = 4096  # to make collisions between simultaneous programs unlikely
_TRIES = 100
# messages of torch's allocators (CUDA, CPU), of the system (ENOMEM), of C++ and of Python
_MESSAGES = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror")
_FEWEST_OPEN_FILES = 256  # a rank on a CPU needs about 60; one on a GPU, and each further host, need more
_JEMALLOC = "libjemalloc.so.2"
_MALLOC_SETTINGS = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD"}  # set by the user: no change
# numbers of options in glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST_BYTES = 2**31 - 1  # mallopt takes an int


def resident_bytes() -> tuple[int, int]:
    """Return the current and the highest resident set of this process: VmRSS and VmHWM of proc(5)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        values = dict(line.split(":", 1) for line in file)
    now, highest = (int(values[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, highest


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of torch, Python or the system means that memory ran out."""
    return isinstance(error, MemoryError) or mentions_out_of_memory(str(error))


def mentions_out_of_memory(text: str) -> bool:
    """Return whether an error message or the output of a process reports memory that could not be allocated."""
    return any(message in text.lower() for message in _MESSAGES)


def kernel_oom_kills() -> int | None:
    """Return how many processes of this host the kernel has killed for lack of memory since it booted.

    The count includes kills in control groups. None if the kernel has no such counter (oom_kill in /proc/vmstat, since
    Linux 4.13).
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def restart_with_jemalloc() -> None:
    """Restart this program with jemalloc instead of glibc's malloc, under the same process id.

    glibc returns large freed blocks to the kernel, so the temporaries of each step are mapped, zeroed and faulted in
    again, page by page. jemalloc is set to return nothing. Without jemalloc, glibc's heap is set not to shrink (see
    `keep_freed_memory`); this heap fragments more. Measured with a model of 34 M parameters (8 x 512 tokens, bf16,
    ZeRO-1) on 2 AVX512_BF16 cores: the peak is 1.22 GB with jemalloc and 1.45 to 1.64 GB with glibc, at the same speed.

    Does nothing if the program trains on a GPU, if `jemalloc_environment` is empty, or if the process was not started
    as `python PROGRAM` or `python -m MODULE` (for example by fork). Call it before slow imports: then a restart takes
    0.1 s.
    """
    values = jemalloc_environment(os.environ) if wants_cpu() else {}
    module = getattr(sys.modules["__main__"], "__spec__", None)  # None: not started with -m
    if values and (sys.argv[0] in sys.orig_argv or (module is not None and module.name in sys.orig_argv)):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **values})


def jemalloc_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that preload jemalloc, from this Python's prefix or from the system's libraries.

    Empty if jemalloc is not installed, or if the user has set MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ (see mallopt(3))
    or LD_PRELOAD. A MALLOC_CONF of the user is kept.
    """
    if sys.platform != "linux" or _MALLOC_SETTINGS & environ.keys():
        return {}
    names = (str(Path(sys.prefix, "lib", _JEMALLOC)), _JEMALLOC)
    library = next((name for name in names if _can_be_loaded(name)), None)
    if library is None:
        return {}
    return {"LD_PRELOAD": library,
            "MALLOC_CONF": environ.get("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1")}


def _can_be_loaded(library: str) -> bool:
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
    if _MALLOC_SETTINGS & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _MOST_BYTES))


def port_is_free(port: int) -> bool:
    """Return whether a server can listen on a TCP port of this host, on all addresses, as torch's TCPStore does."""
    try:
        listen_on_all_addresses(port).close()
    except OSError as error:
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def listen_on_all_addresses(port: int) -> socket.socket:
    """Return a server on all addresses of this host, of IPv6 too if it has them. Raises OSError."""
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


def free_port() -> int:
    """Return a free TCP port, chosen at random, so that simultaneous programs rarely collide.

    The port is below the range that the kernel uses for outgoing connections. A port in that range could be taken while
    the rank that will listen on it is still importing torch.
    """
    kernel_range = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_of_kernel = int(kernel_range.read_text().split()[0]) if kernel_range.exists() else 32768
    enough = first_of_kernel - _FIRST_FREE_PORT >= _ENOUGH_PORTS  # some clusters give the kernel nearly all ports
    ports = range(_FIRST_FREE_PORT, first_of_kernel if enough else 2**16)
    generator = random.SystemRandom()  # independent of a program's seed, so that two runs choose different ports
    tries = (generator.choice(ports) for _ in range(_TRIES))
    return next((port for port in tries if port_is_free(port)), 0) or _any_port()


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_open_files() -> None:
    """Raise ConfigError if a rank cannot open enough files: torch, gloo and NCCL then fail with tracebacks, or hang."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _FEWEST_OPEN_FILES:
        raise ConfigError("ulimit -n", found=f"{limit} open files per process",
                          expected=f"at least {_FEWEST_OPEN_FILES}",
                          remedy="run `ulimit -n 4096` before the launcher's command")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules in this block without garbage collections; later collections ignore their objects.

    Modules create hundreds of thousands of objects and hardly any garbage. The collector would search them again and
    again: 0.2 s of the 1.5 s in which torch and DeepSpeed are imported, and 0.1 s whenever it searches all objects.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def end_process(code: int) -> NoReturn:
    """Run the exit handlers and end this process with an exit code, without finalizing the interpreter.

    Shortly after a collective, a thread of gloo frees the collective's tensors, which needs the interpreter's lock. If
    the interpreter is being finalized at that moment, Python <= 3.13 ends the thread inside a destructor. Then C++
    aborts with "terminate called without an active exception" (SIGABRT), although all work is done (torch 2.13,
    PyObjectSlot::decref). Guarded by tests/distributed/memory/test_abort.py.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads, as sys.exit does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
