"""Work-arounds for ZeRO: hpZ, gradients of shared sequences (defect R), dtypes of `zero.Init` (S), one rank, NVMe (C).

Guarded by tests/distributed/test_upstream.py, test_c_*, test_r_* and test_s_*, and by
tests/distributed/test_parity.py, where engines with and without hpZ follow each other.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
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


def parameters_on_nvme(engine: DeepSpeedEngine) -> bool:
    """Return whether the engine offloads parameters to NVMe."""
    return bool(getattr(engine.optimizer, "params_in_nvme_and_cpu", False))


def save_complete_nvme_checkpoints(engine: DeepSpeedEngine) -> None:
    """Defect C: make checkpoints with NVMe contain the complete optimizer state, and a resume restore all of it.

    DeepSpeed 0.19.8 (runtime/zero/stage3.py, _rigid_load_state_dict; runtime/engine.py, load_checkpoint):
    `save_checkpoint` writes empty tensors and copies the swap folder. `load_checkpoint` skips the optimizer file.
    Sub-groups that were not swapped (under 1 MiB) are never restored. Of the others, only the weights are restored.
    With parameters on NVMe the load raises AttributeError.

    With this patch, zero_to_fp32 works, other offload settings can load the checkpoint, and the swap folder is not
    copied.
    """
    optimizer = engine.optimizer
    engine.zero_nvme_offload_optimizer = lambda: False  # from now on, only save_checkpoint and load_checkpoint call it
    rigid_state_dict = optimizer._rigid_state_dict

    def complete_state_dict() -> dict[str, Any]:
        state = rigid_state_dict()
        fp32_groups, base_states = _read_sub_groups(optimizer)
        state["fp32_flat_groups"] = fp32_groups
        state["optimizer_state_dict"] = {**state["optimizer_state_dict"], "state": base_states}
        return state

    def load_state_dict(state: dict[str, Any], load_optimizer_states: bool = True) -> None:
        optimizer.loss_scaler = state["loss_scaler"]
        optimizer.dynamic_loss_scale = state["dynamic_loss_scale"]
        optimizer.overflow = state["overflow"]
        _write_sub_groups(optimizer, state, load_optimizer_states)

    optimizer._rigid_state_dict = complete_state_dict
    optimizer._rigid_load_state_dict = load_state_dict


def _swapped_in(optimizer: DeepSpeedZeroOptimizer_Stage3, sub_group: int) -> torch.Tensor:
    """Return the flat fp32 parameter of a sub-group. Reads it from NVMe first if it is swapped out."""
    if optimizer._swappable_optimizer_subgroup(sub_group):
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    return optimizer.fp32_partitioned_groups_flat[sub_group]


def _state_order(optimizer: DeepSpeedZeroOptimizer_Stage3) -> list[int]:
    """Return the sub-groups in the order of torch's Optimizer.state_dict: by parameter group."""
    return sorted(range(len(optimizer.fp16_groups)), key=lambda i: (optimizer.sub_group_to_group_id[i], i))


def _read_sub_groups(optimizer: DeepSpeedZeroOptimizer_Stage3) -> tuple[list[torch.Tensor], dict[int, dict[str, Any]]]:
    """Return (flat fp32 weights of each sub-group, base optimizer's state by parameter number), copied to the host."""
    fp32_groups: list[torch.Tensor] = []
    states: dict[int, dict[str, Any]] = {}
    parameter_number = {sub_group: i for i, sub_group in enumerate(_state_order(optimizer))}
    for sub_group in range(len(optimizer.fp16_groups)):
        parameter = _swapped_in(optimizer, sub_group)
        fp32_groups.append(parameter.detach().cpu().clone())
        if optimizer.optimizer.state.get(parameter):
            states[parameter_number[sub_group]] = {key: value.cpu().clone() if torch.is_tensor(value) else value
                                                   for key, value in optimizer.optimizer.state[parameter].items()}
        if optimizer._swappable_optimizer_subgroup(sub_group):
            optimizer._release_swap_buffers(sub_group)
    return fp32_groups, states


def _write_sub_groups(optimizer: DeepSpeedZeroOptimizer_Stage3, saved: dict[str, Any], with_states: bool) -> None:
    """Restore what `_read_sub_groups` returned, and refresh the 16-bit parameters from the fp32 ones."""
    states = saved["optimizer_state_dict"]["state"]
    if with_states:
        for group, saved_group in zip(optimizer.optimizer.param_groups, saved["optimizer_state_dict"]["param_groups"],
                                      strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
    optimizer._partition_all_parameters()
    parameter_number = {sub_group: i for i, sub_group in enumerate(_state_order(optimizer))}
    for sub_group in range(len(optimizer.fp16_groups)):
        swappable = optimizer._swappable_optimizer_subgroup(sub_group)
        parameter = optimizer.fp32_partitioned_groups_flat[sub_group]
        if with_states and parameter_number[sub_group] in states:
            _write_state(optimizer, sub_group, parameter, states[parameter_number[sub_group]], swappable)
        elif swappable:
            optimizer._optimizer_states_and_gradient_swap_in(sub_group)
        parameter.data.copy_(saved["fp32_flat_groups"][sub_group])
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        if swappable:
            optimizer._optimizer_states_and_gradient_swap_out(sub_group)


def _write_state(optimizer: DeepSpeedZeroOptimizer_Stage3, sub_group: int, parameter: torch.Tensor,
                 saved: dict[str, Any], swappable: bool) -> None:
    """Set the base optimizer's state of a sub-group. A swappable sub-group remains in memory."""
    state = optimizer.optimizer.state[parameter]
    if swappable:
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    for key, value in saved.items():
        if torch.is_tensor(value) and torch.is_tensor(state.get(key)) and state[key].shape == value.shape:
            state[key].data.copy_(value)
        else:
            state[key] = value.to(parameter.device) if torch.is_tensor(value) else value
