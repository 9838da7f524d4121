"""The guard against bad steps: it reports skipped updates and spikes, and decides when the run is rolled back."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from pretrain.active_extensions import advice_on
from pretrain.config.plan import Plan
from pretrain.data.samples.blend import BlendedSamples
from pretrain.engine.attachments import attachments
from pretrain.engine.spikes import Spike
from pretrain.engine.steps import global_grad_norm, loss_scale, skipped_steps
from pretrain.engine.update_guard import FP16_OVERFLOW, SkippedUpdate, begin_skipped_update
from pretrain.errors import GuardError
from pretrain.monitor.announce import stopped_by_guard
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal import Screen

_FIRST_STEPS = 10  # first steps of a process, in which a gradient of 0 is reported


@dataclass(frozen=True)
class BadSteps:
    """Consecutive bad steps, because of which the run has to return to an earlier checkpoint."""

    reason: str
    first_step: int
    last_step: int
    consumed_samples: int  # including the samples of the last step
    weights_changed: bool  # False if each of these updates was skipped
    is_spike: bool = False  # because of --spike_policy rollback; otherwise because of --max_bad_steps


@dataclass(frozen=True)
class _Step:
    """A trained step. `loss`, `grad_norm` and `skipped` are valid once they have been read from the device."""

    step: int
    consumed_samples: int  # including the samples of this step
    fp16_scale: float  # loss scale of fp16 after the step; 1 in other precisions
    skipped: SkippedUpdate | None = None  # None: the update was made
    loss: float = math.nan
    grad_norm: float = math.nan

    @property
    def is_normal_overflow(self) -> bool:
        """True if the update was skipped only to lower the loss scale of fp16."""
        return self.skipped is not None and not self.skipped.is_bad

    @property
    def is_bad(self) -> bool:
        """True if the step counts for --max_bad_steps."""
        if self.skipped is not None:
            return self.skipped.is_bad
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


class Guard:
    """Observes loss, gradient norm and skipped updates of each step. Its decisions are the same on all ranks.

    All ranks have the same bits of loss, gradient norm and reason of a skipped update, so they need no communication.
    On a GPU the values of a step are copied asynchronously, and read after the next step.

    Args:
        on_bad_step: called with each bad step or spike.
    """

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, folder: RunFolder, screen: Screen, *,
                 on_bad_step: Callable[[int], None] = lambda step: None) -> None:
        self._plan, self._engine, self._folder, self._screen = plan, engine, folder, screen
        self._on_bad_step = on_bad_step
        on_cpu = engine.device.type == "cpu"
        self._windows = list(attachments(engine).spikes.by_name.values())
        self._values = torch.zeros(2) if on_cpu else torch.zeros(2).pin_memory()  # loss, gradient norm
        self._copied = None if on_cpu else get_accelerator().Event()
        self._waits = on_cpu or plan.args.spike_policy == "skip"  # `veto` waits for the device
        self._unread: _Step | None = None
        self._skipped: Callable[[float], SkippedUpdate | None] = lambda loss: None  # reason of the unread step
        self._bad: list[_Step] = []  # the newest bad steps in a row
        self._first_steps = _FIRST_STEPS  # that are left
        self._has_norm = True

    def veto(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        """Return whether the engine must skip this update because of a spike, for --spike_policy skip.

        The engine calls this before the update, with the same values on all ranks. Reading them waits for the device.
        """
        return any(window.find(float(value)) is not None
                   for window, value in zip(self._windows, (loss, grad_norm), strict=True))

    @property
    def in_bad_steps(self) -> bool:
        """True if the newest step that was read is bad. The same on all ranks."""
        return bool(self._bad)

    def observe(self, step: int, loss: torch.Tensor, consumed_samples: int) -> BadSteps | None:
        """Record a finished step. `loss`: scalar on the device; `consumed_samples`: including the samples of this step.

        Returns the bad steps because of which the run has to be rolled back; None: it continues. Raises GuardError if
        it cannot continue.
        """
        finished = self._read()
        self._begin_read(step, loss, consumed_samples)
        if self._waits or step == self._plan.last_step:
            finished += self._read()
        for each in finished:
            bad_steps = self._decide(each)
            if bad_steps is not None:
                return bad_steps
        return None

    def return_to(self, step: int) -> None:
        """Forget the steps after `step`, because the run was rolled back."""
        for window in self._windows:
            window.forget_after(step)
        self._unread, self._bad = None, []

    def _begin_read(self, step: int, loss: torch.Tensor, consumed_samples: int) -> None:
        """Start the copy of loss and gradient norm to the host."""
        norm = global_grad_norm(self._engine)
        self._has_norm = norm is not None
        for i, value in enumerate((loss, 0.0 if norm is None else norm)):
            if torch.is_tensor(value):
                self._values[i].copy_(value.detach().reshape(()), non_blocking=True)
            else:
                self._values[i] = value
        if self._copied is not None:
            self._copied.record()
        self._skipped = begin_skipped_update(self._engine)
        self._unread = _Step(step, consumed_samples, loss_scale(self._engine))

    def _read(self) -> list[_Step]:
        """Return the step whose values were not read yet, if there is one."""
        if self._unread is None:
            return []
        if self._copied is not None:
            self._copied.synchronize()  # waits for this copy, not for the newest step
        loss, grad_norm = self._values.tolist()
        read = replace(self._unread, skipped=self._skipped(loss), loss=loss, grad_norm=grad_norm)
        self._unread = None
        return [read]

    def _decide(self, step: _Step) -> BadSteps | None:
        """Report a step, and return the bad steps if the run has to be rolled back. Raises GuardError."""
        added = [window.add(step.step, value)
                 for window, value in zip(self._windows, (step.loss, step.grad_norm), strict=True)]
        spikes = [spike for spike in added if spike is not None]
        reason = _reason(step, spikes)
        self._report_no_gradient(step)
        if spikes or step.is_bad:
            self._on_bad_step(step.step)
        if step.skipped is not None:
            self._report_skip(step, reason)
        elif reason:
            self._report_spikes(step, spikes, reason)
        if not step.is_normal_overflow:  # which is neither good nor bad
            self._bad = [*self._bad, step] if step.is_bad else []
        if len(self._bad) >= self._plan.args.max_bad_steps:
            self._stop_at_minimum_scale()
            return _bad_steps(f"{len(self._bad)} bad steps in a row (the last one: {reason})", self._bad)
        if spikes and step.skipped is None and self._plan.args.spike_policy == "rollback":
            return replace(_bad_steps(reason, [step]), is_spike=True)
        return None

    def _stop_at_minimum_scale(self) -> None:
        """Raise GuardError if all bad steps are overflows of fp16: an earlier checkpoint would not help."""
        last = self._bad[-1]
        if all(step.skipped is not None and step.skipped.reason == FP16_OVERFLOW for step in self._bad):
            remedy = ", or use a lower learning rate" if not has_no_update(self._engine, last.step) else ""
            raise guard_error(
                self._folder, last.step,
                f"the gradients of fp16 overflowed in {len(self._bad)} steps in a row (--max_bad_steps), and the loss "
                f"scale of {last.fp16_scale:g} cannot be lowered further",
                f'train with bf16{remedy}, or use a smaller "min_loss_scale" (or "loss_scale", if it is static)')

    def _report_no_gradient(self, step: _Step) -> None:
        """Report a gradient of exactly 0 in the first steps, once: otherwise such a run looks healthy."""
        self._first_steps -= 1
        if self._first_steps >= 0 and self._has_norm and step.grad_norm == 0 and step.skipped is None:
            self._first_steps = 0
            reason = "the gradient norm is exactly 0, so that nothing is learned"
            self._folder.event("no_gradient", step=step.step, reason=reason, **self._samples(step))
            causes = "; ".join(["absurd weights that saturate a layer, a batch without a token to predict, or "
                                "gradients that are too small for fp16", *advice_on("no_gradient")])
            self._screen.line(f"warning: step {step.step}: {reason}: because of {causes}")

    def _report_skip(self, step: _Step, reason: str) -> None:
        self._folder.event("skip", step=step.step, reason=reason, **self._samples(step))
        if step.is_bad:
            self._screen.line(f"warning: step {step.step}: the update was skipped: {reason}; "
                              f"{self._samples_text(step)}")

    def _report_spikes(self, step: _Step, spikes: Sequence[Spike], reason: str) -> None:
        """Report spikes of an update that was made, or NaN or infinity if the engine made the update."""
        rolls_back = self._plan.args.spike_policy == "rollback" and bool(spikes)
        action = "the run returns to an earlier checkpoint" if rolls_back else "the update was made"
        for spike in spikes:
            self._folder.event("spike", step=step.step, reason=str(spike), name=spike.name, value=spike.value,
                               mean=spike.mean, std=spike.std, z=spike.z, action=action, **self._samples(step))
        self._screen.line(f"warning: step {step.step}: {reason}; {action}; {self._samples_text(step)}")

    def _samples(self, step: _Step) -> dict[str, object]:
        """Return the samples [first, last) of the global batch, and where the first one is in its epoch.

        A blend has these numbers for each source that gave samples. With samples that are left out or reordered, the
        range may have others between those of the batch.
        """
        ids, dataset = self._ids(step), self._plan.datasets["train"]
        first, end = int(ids.min()), int(ids.max()) + 1
        found: dict[str, object] = {"samples": [first, end]}
        if not isinstance(dataset, BlendedSamples):
            epoch, position = divmod(first, dataset.samples_per_epoch)
            return {**found, "epoch": epoch, "position": position}
        sources = []
        for source, start, stop in zip(dataset.datasets, dataset.counts(first), dataset.counts(end), strict=True):
            if stop > start:
                epoch, position = divmod(start, source.samples_per_epoch)
                sources.append({"source": str(source.sources[0].prefix), "samples": [start, stop], "epoch": epoch,
                                "position": position})
        return {**found, "sources": sources}

    def _samples_text(self, step: _Step) -> str:
        ids = self._ids(step)
        return f"samples {ids.min()} to {ids.max()}"

    def _ids(self, step: _Step) -> npt.NDArray[np.int64]:
        size = self._plan.length.batch_sizes.ending_at(step.consumed_samples)
        return self._plan.read_order.ids(range(step.consumed_samples - size, step.consumed_samples))


def _bad_steps(reason: str, steps: Sequence[_Step]) -> BadSteps:
    return BadSteps(reason, first_step=steps[0].step, last_step=steps[-1].step,
                    consumed_samples=steps[-1].consumed_samples,
                    weights_changed=not all(step.skipped is not None for step in steps))


def _reason(step: _Step, spikes: Sequence[Spike]) -> str:
    """Return what is wrong with a step; "" if nothing is."""
    if not math.isfinite(step.loss):
        return f"the loss is {step.loss}"
    if step.skipped is not None and step.skipped.reason == FP16_OVERFLOW:
        return f"the gradients overflowed in fp16; the loss scale is now {step.fp16_scale:g}"
    if not math.isfinite(step.grad_norm):
        return "a gradient is NaN or infinite"
    if spikes:
        return str(max(spikes, key=lambda spike: spike.z))
    return step.skipped.reason if step.skipped is not None else ""


def has_no_update(engine: DeepSpeedEngine, step: int) -> bool:
    """Return whether all steps up to `step` were skipped. Then the learning rate has had no effect yet."""
    return skipped_steps(engine) >= step


def remedy_for(engine: DeepSpeedEngine, step: int) -> str:
    """Return what the user should correct after bad steps up to `step`."""
    if has_no_update(engine, step):
        advice = "; ".join(advice_on("no_update"))
        return ("correct the initial weights or the data, because there was no update yet, and so the learning rate is "
                "not the cause" + (f" ({advice})" if advice else ""))
    return "correct the cause, for example with a lower learning rate"


def guard_error(folder: RunFolder, step: int, problem: str, remedy: str) -> GuardError:
    """Report a problem after `step`, and return the error with which all ranks end the run."""
    return stopped_by_guard(folder, step, f"step {step}: {problem}. {remedy[:1].upper()}{remedy[1:]}.")
