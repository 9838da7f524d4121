"""Detect that memory ran out, from an exception, from the output of a process, or from the kernel's count of kills."""

from contextlib import suppress

# messages of torch's allocators (CUDA, CPU), of the system (ENOMEM), of C++ and of Python
_MESSAGES = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror")


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
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
