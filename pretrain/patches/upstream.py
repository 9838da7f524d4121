"""Where DeepSpeed 0.19.8 gives a wrong result without a word, and how each is mended here.

One function a defect. `tests/distributed/test_upstream.py` shows each of them twice: the wrong result of plain
DeepSpeed (so the test fails on the day that upstream mends it, and the function can go), and the right one with us.
Defects that are refused instead of mended are in `ds_rules.py` and `ds_schema.py`. Versions: seen in
0.19.8, the only one supported.

    A  fp16 + ZeRO-0: loss never scaled; a stray optimizer step at construction;
       half a gradient whenever the scale grows                                    scale_loss_at_stage_0
    B  pipeline + tied weights + other accumulation dtype: gradients not summed    reduce_tied_gradients
    C  NVMe optimizer: a resume restores nothing, or only part                     make_nvme_checkpoints_whole
    D  ZeRO-1/2 + offload to NVMe becomes CPU offload                              refused: ds_rules.py
    E  torch_autocast fp16 + ZeRO or pipeline: norm and clipping wrong, or crash   refused: ds_schema.py
    F  nn.init in a parent's __init__ does nothing under zero.Init                 model/init.py: after construction
    G  pipeline stages begin with the same RNG state                               engine.py: a seed for each rank
    H  unknown top-level JSON keys are ignored                                     refused: ds_schema.py
    I  sequence parallelism is ignored under a pipeline                            refused: ds_schema.py
    J  SLURM launcher without RANK: every task trains alone                        distributed.py: ranks derived
    K  fp32 + ZeRO-0 + pipeline: gradients clipped by the first stage's norm       clip_fp32_by_whole_norm
    L  Adam on the CPU: another bias correction after a resume than without        correct_bias_by_the_step_alone
Lesser ones, which are loud or only lose information:
    bf16 + ZeRO-0 pipeline checkpoints cannot be read back (KeyError 0)            load_checkpoint
    on CPUs each run leaves 66 MiB a rank in /dev/shm, until memory is full        remove_shared_memory_names
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import clip_tensors_by_global_norm, get_global_norm_of_tensors
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


def apply(engine: DeepSpeedEngine) -> None:
    """Mend a freshly initialised engine in place, wherever one of the defects touches it."""
    if isinstance(engine.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        scale_loss_at_stage_0(engine)
    if isinstance(engine, PipelineEngine):
        reduce_tied_gradients(engine)
    if engine.zero_nvme_offload_optimizer() or _params_on_nvme(engine):
        make_nvme_checkpoints_whole(engine)
    if engine.zero_optimization_stage() == 0 and not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        clip_fp32_by_whole_norm(engine)
    correct_bias_by_the_step_alone(getattr(engine.optimizer, "optimizer", engine.optimizer))


def scale_loss_at_stage_0(engine: DeepSpeedEngine) -> None:
    """A: `DeepSpeedEngine.backward` scales the loss only for a ZeROOptimizer, and FP16_Optimizer.step divides anyway
    (runtime/engine.py; upstream PR #8393). The gradient is scaled here where it leaves the loss, which leaves the
    reported loss alone.

    FP16_Optimizer also runs one step with zero gradients at construction (fp16/fused_optimizer.py,
    initialize_optimizer_states), which decays the master weights and counts as Adam's first step: undone.
    """
    optimizer = engine.optimizer
    optimizer.optimizer.state.clear()
    optimizer.refresh_fp32_params()
    if not engine.fp16_enabled():
        return
    loss_fn: Callable[..., torch.Tensor] = engine.module.loss_fn

    def scaled_loss_fn(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        loss = loss_fn(outputs, labels)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * optimizer.loss_scale_config.cur_scale)
        return loss

    engine.module.loss_fn = scaled_loss_fn
    _unscale_by_the_scale_used(optimizer)


def _unscale_by_the_scale_used(optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
    """A: `step` lets the loss scale grow before it divides the gradients (and the norm) by it, so every such step
    takes half of its gradient. FP16_UnfusedOptimizer besides reports the norm of the scaled gradients, and counts tied
    ones once a stage: it looks for the mark of a replica on the gradient, which only the parameter has.
    """
    update_scale, step = optimizer._update_scale, optimizer.step
    unfused = isinstance(optimizer, FP16_UnfusedOptimizer)

    def step_then_grow(closure: None = None) -> bool:
        for parameter in (p for group in optimizer.fp16_groups for p in group if unfused and p.grad is not None):
            parameter.grad.ds_pipe_replicated = getattr(parameter, "ds_pipe_replicated", False)
        overflow: bool = step(closure)
        if not overflow:
            if unfused:
                optimizer._global_grad_norm /= optimizer.loss_scale_config.cur_scale
            update_scale(False)
        return overflow

    optimizer._update_scale = lambda skip: update_scale(skip) if skip else None
    optimizer.step = step_then_grow


def reduce_tied_gradients(engine: PipelineEngine) -> None:
    """B: `PipelineEngine._exec_reduce_tied_grads` sums `weight.grad`, but ZeRO-1 keeps the gradient elsewhere when it
    accumulates in another dtype (pipe/engine.py; stage_1_and_2.py, get_gradient_for_reduction).
    """

    def exec_reduce_tied_grads(self: PipelineEngine) -> None:
        for weight, group in self.module.get_tied_weights_and_groups():
            if self.using_bf16_optimizer:
                grad = weight._hp_grad
            elif hasattr(self.optimizer, "get_gradient_for_reduction"):
                grad = self.optimizer.get_gradient_for_reduction(weight)
            else:
                grad = weight.grad
            if grad is not None:
                dist.all_reduce(grad, group=group)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: exec_reduce_tied_grads}


def _params_on_nvme(engine: DeepSpeedEngine) -> bool:
    return bool(getattr(engine.optimizer, "params_in_nvme_and_cpu", False))


def make_nvme_checkpoints_whole(engine: DeepSpeedEngine) -> None:
    """C: with an NVMe optimizer `save_checkpoint` writes empty tensors and copies the swap folder beside them, and
    `load_checkpoint` skips the optimizer file: what was not swapped (sub-groups under 1 MiB) is never restored, and of
    the rest only the weights. With parameters on NVMe the load raises AttributeError (zero/stage3.py,
    _rigid_load_state_dict; engine.py, load_checkpoint).

    Here the optimizer file holds what it holds without NVMe, so zero_to_fp32 and a load with other offload work too,
    and the swap folder is not copied.
    """
    optimizer = engine.optimizer
    engine.zero_nvme_offload_optimizer = lambda: False  # only save_checkpoint and load_checkpoint ask after init
    rigid_state_dict = optimizer._rigid_state_dict

    def whole_state_dict() -> dict[str, Any]:
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

    optimizer._rigid_state_dict = whole_state_dict
    optimizer._rigid_load_state_dict = load_state_dict


def _swapped_in(optimizer: DeepSpeedZeroOptimizer_Stage3, sub_group: int) -> torch.Tensor:
    """The flat fp32 parameter of a sub-group, read in from NVMe if that is where it lies."""
    if optimizer._swappable_optimizer_subgroup(sub_group):
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    return optimizer.fp32_partitioned_groups_flat[sub_group]


def _state_order(optimizer: DeepSpeedZeroOptimizer_Stage3) -> list[int]:
    """Sub-groups in the order in which torch's Optimizer.state_dict numbers them: by parameter group."""
    return sorted(range(len(optimizer.fp16_groups)), key=lambda i: (optimizer.sub_group_to_group_id[i], i))


def _read_sub_groups(optimizer: DeepSpeedZeroOptimizer_Stage3) -> tuple[list[torch.Tensor], dict[int, dict[str, Any]]]:
    """(flat fp32 weights of each sub-group, state of the base optimizer by parameter number), as copies on the host."""
    fp32_groups: list[torch.Tensor] = []
    states: dict[int, dict[str, Any]] = {}
    number = {sub_group: i for i, sub_group in enumerate(_state_order(optimizer))}
    for sub_group in range(len(optimizer.fp16_groups)):
        parameter = _swapped_in(optimizer, sub_group)
        fp32_groups.append(parameter.detach().cpu().clone())
        if optimizer.optimizer.state.get(parameter):
            states[number[sub_group]] = {key: value.cpu().clone() if torch.is_tensor(value) else value
                                         for key, value in optimizer.optimizer.state[parameter].items()}
        if optimizer._swappable_optimizer_subgroup(sub_group):
            optimizer._release_swap_buffers(sub_group)
    return fp32_groups, states


def _write_sub_groups(optimizer: DeepSpeedZeroOptimizer_Stage3, saved: dict[str, Any], with_states: bool) -> None:
    """The inverse of `_read_sub_groups`, which also refreshes the 16-bit parameters from the fp32 ones."""
    states = saved["optimizer_state_dict"]["state"]
    if with_states:
        for group, saved_group in zip(optimizer.optimizer.param_groups, saved["optimizer_state_dict"]["param_groups"],
                                      strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
    optimizer._partition_all_parameters()
    number = {sub_group: i for i, sub_group in enumerate(_state_order(optimizer))}
    for sub_group in range(len(optimizer.fp16_groups)):
        swappable = optimizer._swappable_optimizer_subgroup(sub_group)
        parameter = optimizer.fp32_partitioned_groups_flat[sub_group]
        if with_states and number[sub_group] in states:
            _write_state(optimizer, sub_group, parameter, states[number[sub_group]], swappable)
        elif swappable:
            optimizer._optimizer_states_and_gradient_swap_in(sub_group)
        parameter.data.copy_(saved["fp32_flat_groups"][sub_group])
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        if swappable:
            optimizer._optimizer_states_and_gradient_swap_out(sub_group)


def _write_state(optimizer: DeepSpeedZeroOptimizer_Stage3, sub_group: int, parameter: torch.Tensor,
                 saved: dict[str, Any], swappable: bool) -> None:
    """Set a sub-group's base-optimizer state; a swappable sub-group is left swapped in."""
    state = optimizer.optimizer.state[parameter]
    if swappable:
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    for key, value in saved.items():
        if torch.is_tensor(value) and torch.is_tensor(state.get(key)) and state[key].shape == value.shape:
            state[key].data.copy_(value)
        else:
            state[key] = value.to(parameter.device) if torch.is_tensor(value) else value


def clip_fp32_by_whole_norm(engine: DeepSpeedEngine) -> None:
    """K: in fp32 at stage 0 `clip_grad_norm_` leaves out the parameters of every pipeline stage but the first, as if
    they were replicas (runtime/utils.py: get_model_parallel_rank is the stage), so clipping depends on the layout.
    `get_global_grad_norm` stays None besides, and without clipping no norm is taken.
    """
    max_norm = engine.gradient_clipping()

    def clip() -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        counted = [p.grad for p in parameters if not getattr(p, "ds_pipe_replicated", False)]
        engine._global_grad_norm = norm = get_global_norm_of_tensors(counted, mpu=engine.mpu)
        if max_norm > 0:
            clip_tensors_by_global_norm([p.grad for p in parameters], max_norm=max_norm, global_norm=norm)

    engine.clip_fp32_gradients = clip
    if max_norm == 0:  # then the engine does not call it
        engine.optimizer.register_step_pre_hook(lambda *_: clip())


def correct_bias_by_the_step_alone(optimizer: torch.optim.Optimizer) -> None:
    """L: the CPU kernels take beta^step as a running product of fp32 factors, but begin it anew with pow() after a
    resume (csrc/includes/cpu_adam.h, IncrementStep): the last bits differ, and so the weights. Step 0 for an empty
    tensor before each real one makes them take pow() always.
    """
    empty = [torch.empty(0) for _ in range(4)]
    if isinstance(optimizer, DeepSpeedCPUAdam):
        def forget(*_: Any) -> None:
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, 0.0, *optimizer.defaults["betas"], 1.0, 0.0, True,
                                              *empty)
    elif isinstance(optimizer, FusedAdam) and optimizer._dummy_overflow_buf.device.type == "cpu":
        def forget(*_: Any) -> None:
            optimizer.multi_tensor_adam(1, optimizer._dummy_overflow_buf, [[tensor] for tensor in empty], 0.0,
                                        *optimizer.defaults["betas"], 1.0, 0, optimizer.adam_w_mode, 1, 0.0)
    else:
        return
    optimizer.register_step_pre_hook(forget)


def load_checkpoint(engine: DeepSpeedEngine, folder: Path, tag: str) -> dict[str, Any]:
    """`engine.load_checkpoint`, which hands BF16_Optimizer the wrong file at stage 0 (KeyError 0; engine.py,
    _load_checkpoint). Returns the client state. Raises RuntimeError where the engine loads nothing.
    """
    bf16_at_stage_0 = isinstance(engine.optimizer, BF16_Optimizer) and not engine.zero_optimization()
    path, client_state = engine.load_checkpoint(str(folder), tag=tag, load_optimizer_states=not bf16_at_stage_0)
    if path is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {folder / tag}")
    if bf16_at_stage_0 and not engine._load_zero_checkpoint(str(folder), tag):
        raise RuntimeError(f"DeepSpeed found no optimizer files in {folder / tag}")
    return client_state


def remove_shared_memory_names(rank: int) -> None:
    """To be called by every rank once the process group stands: `shm_initialize` (csrc/cpu/comm/shm.cpp) opens the
    segments by name but never unlinks them. The mappings outlive their names, so nothing remains even after a kill.
    """
    dist.barrier()  # all have opened all
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    segment = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    segment.unlink(missing_ok=True)
