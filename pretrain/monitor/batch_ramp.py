"""Changes of the global batch size (--batch_schedule): on the terminal and in events.jsonl."""

from pretrain.data.token_schedules import BatchSizes
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal.screen import Screen


class BatchRamp:
    """The global batch size of each step. It reports each change once, also if a resume lies just before it."""

    def __init__(self, sizes: BatchSizes, folder: RunFolder, screen: Screen) -> None:
        self._sizes, self._folder, self._screen = sizes, folder, screen
        self._last: int | None = None  # batch size of the last step

    def size_at(self, step: int, consumed_samples: int) -> int:
        """Return the batch size of step number `step`, which begins at this data position."""
        before = self._sizes.ending_at(consumed_samples) if self._last is None else self._last
        size = self._last = self._sizes.at(consumed_samples)
        if size != before and step > 1:
            self._folder.event("batch", step=step, global_batch_size=size, before=before,
                               consumed_samples=consumed_samples)
            self._screen.line(f"step {step}: the global batch grows from {before} to {size} samples")
        return size
