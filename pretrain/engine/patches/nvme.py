"""Defect C: checkpoints of an optimizer on NVMe are incomplete.

Guarded by tests/distributed/test_upstream.py, test_c_*.
"""

from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


def parameters_on_nvme(engine: DeepSpeedEngine) -> bool:
    """Return whether the engine offloads parameters to NVMe."""
    return bool(getattr(engine.optimizer, "params_in_nvme_and_cpu", False))


def save_complete_nvme_checkpoints(engine: DeepSpeedEngine) -> None:
    """Make checkpoints contain the complete optimizer state, as without NVMe, and make a resume restore all of it.

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
