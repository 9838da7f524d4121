"""Memory of this process that no file backs, and its peak while a test runs something."""

import threading
import time
from pathlib import Path


def anonymous_bytes() -> int:
    """Return the bytes of this process's memory that no file backs, so that the kernel cannot reclaim them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


class MemoryWatch:
    """Context manager that samples this process's anonymous memory every 5 ms.

    `before` and `peak` are the bytes before the block and at the peak.
    """

    def __enter__(self) -> "MemoryWatch":
        self.before = self.peak = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
