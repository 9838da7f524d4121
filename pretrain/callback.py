"""The seam between the step loop and all that it does not know: what a part of a run may do, and when.

A run is the loop of `pretrain/step_loop.py`. Whatever that loop would not miss is a `Callback`: parts of this package
and of users' packages alike. A class overrides the points that it needs. Only these are called, so that a point which
nobody uses costs nothing. This module imports neither torch nor DeepSpeed, and nothing of this package that does.

The points of a run, in the order in which they are called:

    connected                                the ranks can talk; there is no engine yet
    before_engine                            a run without a checkpoint: engines for trials may be built
    start                                    the engine is built and has its weights; nothing is trained yet
    for each step:
        begin_step                           before the data of the step is read
        before_step                          the micro-batches of this rank are known
        before_update, rejects, after_update around `optimizer.step` (see UpdatePart)
        after_step                           trained; the results are still on the device
        rank_values, row_values, after_row   logged steps: the row of metrics.jsonl is made, and written
        accepted                             the guard against bad steps has accepted the step
        after_row, after_evaluation          if an evaluation is due
        end_step                             all of the step is done but a save
        before_save                          if a checkpoint is due
    bad_step, rolled_back                    the guard has found a bad step; the run has returned to a checkpoint
    requested                                a signal or a file asks for something
    close                                    after the last step, or when the run is stopped

Every point is called on all ranks, in the same order of callbacks. So a callback may use collective operations, if all
its ranks do. It must not raise an exception on some ranks only.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pretrain.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from deepspeed import DeepSpeedEngine

    from pretrain.config.plan import Plan
    from pretrain.data.loader import Loader, MicroBatch
    from pretrain.distributed.world import World
    from pretrain.monitor.meter import Meter
    from pretrain.monitor.write_run_folder import RunFolder
    from pretrain.resilience.requests import Request
    from pretrain.resilience.watchdog import Watchdog
    from pretrain.terminal import Screen


_PHASES = ("eval", "save")
_REVERSED = ("after_step", "close")
_AROUND_UPDATE = ("before_update", "rejects", "after_update")


class UpdatePart:
    """Code that runs around the optimizer's step of an engine. A part overrides the methods that it needs.

    Parts run in the order of `order` (ties: by the name of the class) before the step, and in the reverse order after
    it, whenever they were added.
    """

    order: float = 50
    reads_norm = True  # False: `rejects` is not called, even if it is overridden

    def before_update(self) -> None:
        """Called when the gradients of all micro-batches are there, before they are reduced to a norm and clipped."""

    def rejects(self, scaled_norm: "torch.Tensor") -> bool:
        """Called with the global gradient norm, still scaled by fp16's loss scale. True: all ranks skip the update.

        All ranks must return the same. It is not called if the norm is not finite, or if an earlier part has rejected
        the update. DeepSpeed may ask several times in a step. Reading the norm makes the host wait for the device.
        """
        return False

    def after_update(self) -> None:
        """Called after the step. `optimizer.overflow` is true if the host has skipped the update.

        In bf16 on GPUs the device may skip it, and the host learns this in the next step (patches/late_skip.py).
        """


@dataclass(frozen=True)
class StepResult:
    """Results of a step. The tensors are on the device: to read them, the host would have to wait."""

    loss: "torch.Tensor"  # mean over the tokens of the global batch, before the update: a scalar, equal on all ranks
    lr: float  # learning rate of the step


@dataclass(frozen=True)
class Trial:
    """The run before its engine is built, for callbacks that try engines of their own."""

    plan: "Plan"
    # (plan) -> engine with the weights that the run begins with; it must be gone at the end
    build: "Callable[[Plan], DeepSpeedEngine]"
    folder: "RunFolder"  # writes on rank 0 only
    report: Callable[[str], None]  # says what is done now, and that there is progress; on all ranks


class Callback(UpdatePart):
    """A part of a run that the step loop does not know.

    Callbacks run in the order of `order` (ties: by name), and in the reverse order in `after_step` and `close`.
    """

    name: ClassVar[str] = ""  # in messages, and of its state in checkpoints; default: the name of the class
    of_run: ClassVar[bool] = False  # True: the state is about the run, and a branch of the run starts without it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def connected(self, plan: "Plan") -> None:
        """Called when the ranks can talk, before the engine is built: the last place for a cheap ConfigError.

        All ranks must raise it, or none (`distributed/collectives.py`, from_rank_0).
        """

    def before_engine(self, trial: Trial) -> None:
        """Called before the engine is built, if the run begins at step 0: for trials on engines of their own.

        All ranks must raise a ConfigError, or none.
        """

    def start(self, run: "Run") -> None:
        """Called once: `run` has its engine, with all weights and states, its data, and the files of the run."""

    def begin_step(self, run: "Run") -> None:
        """Called before the data of step `run.step` is read."""

    def before_step(self, run: "Run", micro_batches: "list[MicroBatch]") -> None:
        """Called before the forward pass of step `run.step`. `run.consumed_samples` does not count its samples."""

    def after_step(self, run: "Run", result: StepResult) -> None:
        """Called after each step, before anything is read from the device. `run.consumed_samples` counts the step."""

    def rank_values(self, run: "Run") -> Sequence[float]:
        """Return values of this rank for the row of a logged step; all ranks return equally many.

        They are gathered with those that the row has anyway, so that they cost no collective operation of their own.
        """
        return ()

    def row_values(self, run: "Run", ranks: "np.ndarray") -> Mapping[str, Any]:
        """Return keys that this callback adds to the row of a logged step; the values of rank 0 are written.

        `ranks`: [ranks, values], what `rank_values` has returned on all ranks.
        """
        return {}

    def after_row(self, run: "Run", row: Mapping[str, Any]) -> None:
        """Called with each row of metrics.jsonl of a training step, or with "split" of an evaluation.

        Ranks above 0 have only their own values in the keys that all ranks contribute to.
        """

    def after_evaluation(self, run: "Run", loss: float | None) -> None:
        """Called after an evaluation on the validation data, with its mean loss, equal on all ranks.

        `loss` is None if the run has no validation data.
        """

    def accepted(self, run: "Run") -> None:
        """Called after each step that the guard against bad steps has accepted, before an evaluation: for checks."""

    def end_step(self, run: "Run") -> None:
        """Called after each accepted step, and its evaluation if one was due: for what takes long, and for files."""

    def bad_step(self, run: "Run", step: int) -> None:
        """Called with a step whose update was skipped, or whose loss or gradient norm is a spike, after it was trained.

        On a GPU the guard reads a step after the next one, so that `step` may be smaller than `run.step`.
        """

    def before_save(self, run: "Run") -> None:
        """Called before a checkpoint is saved. An exception, on all ranks, prevents it."""

    def rolled_back(self, run: "Run") -> None:
        """Called after the run has returned to the checkpoint of `run.step`; states are as in the checkpoint."""

    def requested(self, run: "Run", request: "Request") -> None:
        """Called after a step in which the ranks have agreed on a request."""

    def close(self, run: "Run") -> None:
        """Called at the end of the loop: end background work, write what is left."""

    def state(self) -> Any:
        """Return a state that JSON can represent, for the manifest of a checkpoint; None: there is none.

        Called on all ranks; the state of rank 0 is saved.
        """
        return None

    def set_state(self, state: Any) -> None:
        """Continue from a state that `state` returned; None: from the start.

        Called on all ranks before `start`, if the run resumes in any layout, and before `rolled_back`.
        """


@dataclass
class Run:
    """A run, as its callbacks see it. They may read all fields.

    Of these they change none but, in `start`, the position in the data.
    """

    plan: "Plan"
    world: "World"
    engine: "DeepSpeedEngine"
    folder: "RunFolder"  # writes on rank 0 only
    screen: "Screen"  # prints on rank 0 only
    watchdog: "Watchdog"
    meter: "Meter"
    reject: Callable[[str], None]  # makes all ranks end after this step, without a save, with this line; on any rank
    step: int  # number of steps done; during a step, its number
    consumed_samples: int  # position in the data
    loaders: "dict[str, Loader]" = field(default_factory=dict)  # by the names of the plan's datasets
    steps_here: int = 0  # number of the step since the start of this process, from 1
    stopped_by: str = ""  # see `stop`
    saves_at_stop: bool = True
    is_done: bool = False  # what was to be done is done, although steps are left
    first_step: int = field(init=False)  # number of steps done before this process

    def __post_init__(self) -> None:
        self.first_step = self.step

    def is_due(self, interval: int) -> bool:
        """Return whether something that is done every `interval` steps (0: never), and after the last step, is due."""
        return self.step == self.plan.last_step or (interval > 0 and self.step % interval == 0)

    def event(self, event: str, *, reason: str = "", **details: Any) -> None:
        """Append a row with the number of the step to events.jsonl."""
        self.folder.event(event, step=self.step, reason=reason, **details)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Do something that belongs to no step, "eval" or "save": it has this phase's time limit, and no step gets its
        time. The host waits for the device first. Enter it on all ranks.
        """
        if name not in _PHASES:
            raise ValueError(f"phase {name!r}: expected one of {', '.join(_PHASES)}")
        self.watchdog.enter(name, self.step)
        with self.meter.outside_steps(name):
            yield
        self.watchdog.enter("step", self.step)

    def stop(self, reason: str, *, save: bool = True, is_done: bool = False) -> None:
        """End the run after this step. All ranks must call it in the same step.

        Args:
            reason: of the event "stop".
            save: False: it ends at once; the guard does not see the step, and nothing is evaluated or saved.
            is_done: exit code 0. Otherwise it is 75, and supervisors and SLURM start the run again.
        """
        self.stopped_by, self.saves_at_stop, self.is_done = reason, save, is_done


class Callbacks:
    """The callbacks of a run. `callbacks(point, run, ...)` calls those that override this point."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.all: Sequence[Callback] = sorted(callbacks, key=lambda callback: (callback.order, callback.name))
        self._at: dict[str, list[Callback]] = {}
        names = [callback.name for callback in self.at("state")]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"callback {twice[0]}", problem="two callbacks with a state have this name",
                              remedy="give one of the classes another `name`")

    def at(self, point: str) -> list[Callback]:
        """Return the callbacks that override a point, in their order."""
        if point not in self._at:
            self._at[point] = [callback for callback in self.all if overrides(callback, point)]
        return self._at[point]

    @property
    def around_update(self) -> list[Callback]:
        """The callbacks that have points around the update; Update orders them."""
        return [each for each in self.all if any(overrides(each, point) for point in _AROUND_UPDATE)]

    def connected(self, plan: "Plan") -> None:
        """Call the point `connected`."""
        for callback in self.at("connected"):
            with naming(callback, "connected"):
                callback.connected(plan)

    def before_engine(self, trial: Trial) -> None:
        """Call the point `before_engine`."""
        for callback in self.at("before_engine"):
            with naming(callback, "before_engine"):
                callback.before_engine(trial)

    def check_states(self, run: Run) -> None:
        """Raise ConfigError if JSON cannot represent a state, before a save begins."""
        for callback in self.at("state"):
            with naming(callback, "state", run):
                state = callback.state()
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"callback {callback.name}", problem=f"JSON cannot represent its state: {error}",
                                  remedy="return numbers, texts, lists and mappings of them") from None

    def __call__(self, point: str, run: Run, *args: Any) -> None:
        for callback in reversed(self.at(point)) if point in _REVERSED else self.at(point):
            with naming(callback, point, run):
                getattr(callback, point)(run, *args)

    def rank_values(self, run: Run) -> "dict[Callback, Sequence[float]]":
        """Return the values of this rank, by callback."""
        values: dict[Callback, Sequence[float]] = {}
        for callback in self.at("rank_values"):
            with naming(callback, "rank_values", run):
                values[callback] = callback.rank_values(run)
        return values

    def row_values(self, run: Run, given: "Mapping[Callback, Sequence[float]]", ranks: "np.ndarray") -> dict[str, Any]:
        """Return the keys that all callbacks add to a row.

        Args:
            given: result of `rank_values`.
            ranks: [ranks, values], these values of all ranks, one callback after the other.
        """
        row: dict[str, Any] = {}
        first = {}
        for callback, values in given.items():
            first[callback], ranks = ranks[:, :len(values)], ranks[:, len(values):]
        for callback in self.at("row_values"):
            with naming(callback, "row_values", run):
                row.update(callback.row_values(run, first.get(callback, ranks[:, :0])))
        return row


def overrides(part: UpdatePart, point: str) -> bool:
    """Return whether the class of a callback has its own method for a point."""
    base = Callback if isinstance(part, Callback) else UpdatePart
    return getattr(type(part), point) is not getattr(base, point)


@contextlib.contextmanager
def naming(part: UpdatePart, point: str, run: Run | None = None) -> Iterator[None]:
    """Add the name of a callback, the point and the step to an exception that is no error of this package."""
    try:
        yield
    except Exception as error:
        name = part.name if isinstance(part, Callback) else type(part).__name__
        place = f"in {point} of the callback {name}" + (f", step {run.step}" if run is not None else "")
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(place)
        elif not type(error).__module__.startswith("pretrain."):
            print(f"ds-pretrain: {place}:", file=sys.stderr, flush=True)
        raise
