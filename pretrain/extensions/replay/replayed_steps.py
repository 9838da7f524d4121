"""What a replay does in the ranks of its run: the position of the data, vetoed updates, the examination, the end."""

from pretrain.callback import Callback, Run, StepResult
from pretrain.data.loader import MicroBatch
from pretrain.extensions.replay.order import ReplayOrder
from pretrain.extensions.replay.samples import examine_ordered


class ReplayedSteps(Callback):
    """Trains some steps of a run again, and ends after the step in question, without a save."""

    order = 5

    def __init__(self, order: ReplayOrder) -> None:
        self._replay = order
        self.reads_norm = bool(order.vetoed)

    def start(self, run: Run) -> None:
        self._run = run
        if self._replay.consumed_samples is not None:
            run.consumed_samples = self._replay.consumed_samples

    def before_step(self, run: Run, micro_batches: list[MicroBatch]) -> None:
        examine_ordered(self._replay, run.engine, run.plan, run.step, run.consumed_samples,
                        lambda: run.watchdog.enter("eval", run.step))
        run.watchdog.enter("step", run.step)

    def rejects(self, scaled_norm: object) -> bool:
        """Skip the updates that the run skipped because of a spike."""
        return self._run.step in self._replay.vetoed

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.step == self._replay.step:
            run.stop("replay", save=False, is_done=True)
