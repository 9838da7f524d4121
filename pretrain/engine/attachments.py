"""State that this package keeps for a DeepSpeed engine: one object, the only attribute that it adds to the engine."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine

    from pretrain.engine.phases import PhaseTimers
    from pretrain.engine.spikes import SpikeWindows
    from pretrain.engine.update import Update


class KeepsState(Protocol):
    """A part with a state that JSON can represent, in any layout: see `Callback.state`."""

    def state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@dataclass
class Attachments:
    """State of one engine that is not DeepSpeed's."""

    update: "Update"
    group_settings: list[dict[str, Any]]  # this run's settings of the optimizer's parameter groups
    spikes: "SpikeWindows"
    keep_state: dict[str, KeepsState] = field(default_factory=dict)  # by their names in a checkpoint
    unclaimed_states: dict[str, Any] = field(default_factory=dict)  # in the checkpoint, of parts that this run lacks
    layer_times: tuple[int, ...] = ()  # nanoseconds of each layer, if the pipeline stages depend on them
    operators: dict[str, str] = field(default_factory=dict)  # chosen for this device: {"attention": "flash", ...}
    phase_timers: "PhaseTimers | None" = None  # None: the phases of a step are not measured
    recomputes: bool = False  # a micro-batch is computed again (first_micro_batch.py): hooks that measure ignore it
    rank_loss: "torch.Tensor | None" = None  # see engine/steps.py, rank_loss
    # a pipeline's last micro-batch: shape [micro-batch, tokens], and whether there are documents
    last_shape: "tuple[torch.Size, bool] | None" = None
    only_shape: tuple[int, int] | None = None  # [micro-batch, tokens] for which the blocks are compiled


def attach(engine: "DeepSpeedEngine", attachments: Attachments) -> None:
    """Attach the state to a new engine."""
    engine.ds_pretrain = attachments


def attachments(engine: "DeepSpeedEngine") -> Attachments:
    """Return what `build_engine` has attached to the engine."""
    found: Attachments = engine.ds_pretrain
    return found
