"""Compare copies of the parameters: those of data-parallel ranks, and tied ones of pipeline stages."""

from deepspeed import DeepSpeedEngine

from pretrain.config.validate import Plan


class ReplicaCheck:
    """Compares hashes of the parameters between the ranks that hold copies of them."""

    def __init__(self, plan: Plan, engine: DeepSpeedEngine) -> None:
        self._plan, self._engine = plan, engine

    def check(self, step: int, *, force: bool = False) -> None:
        """Compare the copies every --replica_check_interval steps, or now with `force`; collective.

        Raises CorruptionError, which names the rank, on all ranks.
        """
