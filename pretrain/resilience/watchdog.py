"""The watchdog of a rank: it ends the process with exit code 77 if the main thread makes no progress."""


class Watchdog:
    """Ends this rank if a phase of the step loop exceeds its time-out."""

    def enter(self, phase: str, step: int) -> None:
        """Record that the main thread begins a phase ("data", "step", "eval", "save") of a step."""

    def close(self) -> None:
        """Stop watching."""
