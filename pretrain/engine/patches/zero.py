"""Work-arounds for ZeRO: hpZ, gradients of shared sequences (defect R), dtypes of `zero.Init` (defect S), one rank.

Guarded by tests/distributed/test_upstream.py, test_r_* and test_s_*, by tests/distributed/test_parity.py, where engines
with and without hpZ follow each other, and by tests/extensions/cpu_kernels/test_update_passes.py
(skip_reduction_on_one_rank).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups


def forget_group_of_earlier_engine() -> None:
    """Remove the group of ranks that an earlier engine of this process used for zero_hpz_partition_size.

    DeepSpeed 0.19.8 keeps it (utils/groups.py): the next engine with the key fails at an assertion
    (_create_zero_param_parallel_group), and one without the key would use the group (runtime/engine.py,
    _configure_zero_optimizer). Callbacks may build engines before the one of the run.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def sum_gradients_of_shards(engine: DeepSpeedEngine) -> None:
    """Defect R: sum the gradients of the ranks that share a sequence, and average only over data-parallel ranks.

    DeepSpeed 0.19.8: `__avg_scatter_grads` (runtime/zero/stage3.py), its default, averages over all ranks. Gradients
    are then sequence_parallel_size times too small. ZeRO-1, ZeRO-2, and ZeRO-3 with "reduce_scatter": false divide by
    the data-parallel ranks only. The returned number of ranks is what this function divides by. DeepSpeed before 0.19.4
    has no such function: there, the averages are multiplied.
    """
    optimizer = engine.optimizer
    if not optimizer.reduce_scatter:
        return
    if not hasattr(optimizer, "_gradient_averaging_world_size"):
        _multiply_averages(optimizer)
        return
    average_over = optimizer._gradient_averaging_world_size

    def gradient_averaging_world_size(parameters: Sequence[torch.nn.Parameter], ranks: int) -> float:
        size: int = average_over(parameters, ranks)
        return size / optimizer.sequence_parallel_size

    optimizer._gradient_averaging_world_size = gradient_averaging_world_size


def _multiply_averages(optimizer: Any) -> None:
    partition = optimizer.partition_grads

    def partition_grads(parameters: list[torch.nn.Parameter], averages: list[torch.Tensor]) -> None:
        partition(parameters, [average.mul_(optimizer.sequence_parallel_size) for average in averages])

    optimizer.partition_grads = partition_grads


_set_dtype = InsertPostInitMethodToModuleSubClasses._set_dtype


def keep_dtype_of_partitions() -> None:
    """Defect S: partition parameters in the dtype that the caller of `zero.Init` names.

    DeepSpeed 0.19.8: `_set_dtype` (runtime/zero/partition_parameters.py) reads `dtype or torch.float16 if
    is_fp16_supported() else torch.bfloat16`. Python tests the device first: where it has no fp16, such as a CPU without
    AVX512_FP16, parameters become bf16 whatever `dtype` is.
    """
    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        _set_dtype(self, ds_config, dtype)
        self.dtype = dtype or self.dtype

    InsertPostInitMethodToModuleSubClasses._set_dtype = set_dtype


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
