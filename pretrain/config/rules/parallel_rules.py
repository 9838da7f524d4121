"""Rules for tensor, sequence and expert parallelism."""

from pretrain.config.parallel_degrees import EXPERT, SEQUENCE, TENSOR
from pretrain.config.resolve import ResolvedConfig


def degrees_together(run: ResolvedConfig) -> None:
    """Reject combinations of parallel degrees that no engine here supports."""
    layout = run.layout
    if layout.sequence_parallel_size > 1 and layout.pipeline_stages > 1:
        raise run.error(SEQUENCE, expected="1 with pipeline stages",
                        remedy="DeepSpeed's pipelines ignore it; use ZeRO stage 1, 2 or 3 without stages")
    if layout.sequence_parallel_size > 1 and layout.tensor_parallel_size > 1:
        raise run.error(SEQUENCE, expected="1 with tensor parallelism",
                        remedy=f'tensor-parallel ranks already share the sequences; set one of "{SEQUENCE}" and '
                               f'"{TENSOR}" to 1')
    if layout.expert_parallel_size > 1 and layout.pipeline_stages > 1:
        raise run.error(EXPERT, expected="1 with pipeline stages", remedy="use ZeRO stage 1 or 2 without stages")
