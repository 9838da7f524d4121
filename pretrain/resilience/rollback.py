"""Return a running engine to an earlier checkpoint, and skip the samples that led to the bad steps."""

from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.save.saver import Saver
from pretrain.config.validate import Plan


def roll_back(engine: DeepSpeedEngine, plan: Plan, saver: Saver, *, step: int, consumed_samples: int,
              reason: str) -> tuple[int, int]:
    """Load the newest good checkpoint into the engine; collective.

    Args:
        step: the last step that was trained.
        consumed_samples: samples up to and including those of `step`. They are not read again.

    Returns the step of the checkpoint, and the number of consumed samples to continue with. Raises GuardError if there
    is no good checkpoint, or after --max_rollbacks.
    """
    raise NotImplementedError
