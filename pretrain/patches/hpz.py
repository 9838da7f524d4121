"""ZeRO++'s secondary partitions of the parameters (hpZ) in a process that builds several engines.

Guarded by tests/distributed/test_parity.py, where engines with and without hpZ follow each other.
"""

from deepspeed.utils import groups


def forget_group_of_earlier_engine() -> None:
    """Remove the group of ranks that an earlier engine of this process used for zero_hpz_partition_size.

    DeepSpeed 0.19.8 keeps it (utils/groups.py): the next engine with the key fails at an assertion
    (_create_zero_param_parallel_group), and one without the key would use the group (runtime/engine.py,
    _configure_zero_optimizer). The sanity checks at the start of a run build engines before the one of the run.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
