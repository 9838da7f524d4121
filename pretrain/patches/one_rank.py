"""Reduction of gradients where there is nothing to reduce.

Guarded by tests/distributed/test_update_passes.py.
"""

from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def skip_reduction_on_one_rank(engine: DeepSpeedEngine) -> None:
    """Let ZeRO-1 and ZeRO-2 use the gradients where autograd wrote them, if they have a single data-parallel rank.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads, average_tensor,
    copy_grads_in_partition) copies each gradient into a bucket, divides it by 1, and copies it out of the bucket. The
    bucket gets one element here. Offloaded optimizers and gradients that accumulate in another dtype still need the
    function, because it also moves or converts the gradients.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or not _has_nothing_to_reduce(optimizer):
        return
    optimizer.reduce_ready_partitions_and_remove_grads = lambda parameter, group: None
    optimizer.reduce_bucket_size = 1  # not 0, by which DeepSpeed divides


def _has_nothing_to_reduce(optimizer: Any) -> bool:
    groups = [optimizer.dp_process_group, *optimizer.real_dp_process_group]
    return (all(dist.get_world_size(group) == 1 for group in groups) and optimizer.contiguous_gradients
            and not (optimizer.cpu_offload or optimizer.zenflow)
            and not any(map(optimizer._use_compact_grad_partition_buffer, range(len(optimizer.bit16_groups)))))
