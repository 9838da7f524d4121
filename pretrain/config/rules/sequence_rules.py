"""Rules for sequence parallelism: the dtype of the reduction, and the gradient noise scale."""

from pretrain.config.parallel_degrees import SEQUENCE
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError

_DTYPE, _SEQUENCE_DTYPE = "communication_data_type", "seq_parallel_communication_data_type"


def reduction_dtype(run: ResolvedConfig) -> None:
    """Reject a dtype for the reduction of gradients that DeepSpeed would not use."""
    stage = run.layout.zero_stage
    if run.layout.sequence_parallel_size == 1:
        return
    if run.get(_DTYPE) is not None:
        raise run.error(_DTYPE, problem=f'DeepSpeed ignores it with "{SEQUENCE}"',
                        remedy=f'write "{_SEQUENCE_DTYPE}" instead')
    if run.get(_SEQUENCE_DTYPE, "fp32") not in (None, "fp32") and stage in (1, 2) and run.layout.reduce_scatter:
        raise run.error(_SEQUENCE_DTYPE, expected=f"fp32 at ZeRO stage {stage}",
                        remedy="DeepSpeed always sums gradients of shards of sequences in fp32 there; remove the key")


def noise_scale_of_shards(run: ResolvedConfig) -> None:
    if run.args.noise_scale_interval and run.layout.sequence_parallel_size > 1:
        raise ConfigError("--noise_scale_interval", found=f'"{SEQUENCE}": {run.layout.sequence_parallel_size}',
                          expected="1", remedy="a rank has only the gradient of its shard of each micro-batch")
