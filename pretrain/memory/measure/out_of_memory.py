"""Detect that memory ran out: from an error, from what a process printed, from the kernel's count of its kills."""

from contextlib import suppress

# torch's allocators (CUDA, CPU), the system (ENOMEM), C++ and Python
_WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is torch's of the CUDA or the CPU allocator, Python's own, or the system's."""
    return isinstance(error, MemoryError) or tells_out_of_memory(str(error))


def tells_out_of_memory(text: str) -> bool:
    """Whether an error's text, or a process's last lines, name memory that could not be allocated."""
    return any(word in text.lower() for word in _WORDS)


def kernel_oom_kills() -> int | None:
    """Processes of this host that the kernel has killed for lack of memory, of a control group's too, since it booted.

    None where the kernel does not say (oom_kill in /proc/vmstat, Linux >= 4.13).
    """
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
