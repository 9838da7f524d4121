"""Reports of changes of the global batch size."""

from pretrain.callback import Callback, Run


class BatchRamp(Callback):
    """Reports each change of the global batch size once, also if a resume lies just before it."""

    order = 5

    def __init__(self) -> None:
        self._last: int | None = None  # batch size of the last step

    def begin_step(self, run: Run) -> None:
        sizes, position = run.plan.length.batch_sizes, run.consumed_samples
        before = sizes.ending_at(position) if self._last is None else self._last
        size = self._last = sizes.at(position)
        if size != before and run.step > 1:
            run.event("batch", global_batch_size=size, before=before, consumed_samples=position)
            run.screen.line(f"step {run.step}: the global batch grows from {before} to {size} samples")
