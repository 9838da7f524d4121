"""Defects of optimizers and of fp16.

L (Adam on the CPU), Q (Muon with gradient clipping), T (Muon on CPUs) and AH (Adagrad); A, P, W and AF of fp16: wrong
loss scale and norm, and a step at construction.

Guarded by tests/distributed/test_upstream.py, test_l_*, test_a_*, test_p_* and test_w_*, by
tests/engine/test_optimizers.py, test_q_*, and by tests/distributed/checkpoint/test_optimizers.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from pretrain.callback import UpdatePart
from pretrain.engine.update import GROWING_SCALE, UNSCALED_NORM


def make_bias_correction_stateless(optimizer: torch.optim.Optimizer) -> None:
    """Defect L: make the bias correction of Adam's CPU kernels a function of the step number alone.

    DeepSpeed 0.19.8 (csrc/includes/cpu_adam.h, IncrementStep): the kernels update beta^step as a running product of
    fp32 factors, but compute it by pow() after a resume. The last bits of the correction differ, and so do bits of
    the weights. A call with step 0 on an empty tensor before each step resets the product, so that the kernels always
    use pow().
    """
    empty = [torch.empty(0) for _ in range(4)]
    if isinstance(optimizer, DeepSpeedCPUAdam):
        def reset(*_: Any) -> None:
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, 0.0, *optimizer.defaults["betas"], 1.0, 0.0, True,
                                              *empty)
    elif isinstance(optimizer, FusedAdam) and optimizer._dummy_overflow_buf.device.type == "cpu":
        def reset(*_: Any) -> None:
            optimizer.multi_tensor_adam(1, optimizer._dummy_overflow_buf, [[tensor] for tensor in empty], 0.0,
                                        *optimizer.defaults["betas"], 1.0, 0, optimizer.adam_w_mode, 1, 0.0)
    else:
        return
    optimizer.register_step_pre_hook(reset)


def keep_states_of_current_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Defect AH: give Adagrad the states of the fp32 tensors that it updates, instead of those of the parameters.

    torch's Adagrad makes its states at construction. DeepSpeed 0.19.8 (runtime/bf16_optimizer.py and
    runtime/fp16/unfused_optimizer.py, __init__) then replaces the parameters by fp32 tensors, and the states of the
    parameters remain: `state_dict` ends in a KeyError, so that nothing can be saved.
    """
    current = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    if isinstance(optimizer, torch.optim.Adagrad) and {id(tensor) for tensor in optimizer.state} != current:
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        optimizer.state = type(optimizer)(groups, **optimizer.defaults).state


def clip_only_adam_with_muon(engine: DeepSpeedEngine) -> None:
    """Defect Q: clip only the gradients of parameters that Muon's Adam updates, by their own global norm.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, get_flat_partition; runtime/zero/stage3.py, step) replaces the
    gradients of matrices by orthogonalized updates before it computes the norm. Their norm is about the square root of
    the sum of the matrices' smaller sides, whatever the gradients are. So "gradient_clipping": 1 divides every update
    of the run by this number, and hides large gradients of the other parameters. An orthogonalized update needs no
    clipping: its size does not depend on the gradient's. The norm of a matrix with NaN or infinity still counts.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _patch_stage_3(optimizer)
    else:
        _patch_stages_1_and_2(optimizer)


def convert_steps_of_muons_adam(engine: DeepSpeedEngine) -> None:
    """Let the Adam inside of Muon read checkpoints of its other implementation.

    DeepSpeed 0.19.8 (runtime/zero/muon/muon_optimizer.py, load_state_dict) hands the loaded states to this Adam without
    its own load_state_dict, which would convert them: FusedAdam counts steps by a number, torch's AdamW by a tensor.
    """
    adam = getattr(getattr(engine.optimizer, "optimizer", None), "aux_optimizer", None)
    if isinstance(adam, torch.optim.Optimizer):
        adam.register_step_pre_hook(convert_steps)


def convert_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give the numbers of steps in the states the type that the optimizer's class reads."""
    counts_in_tensors = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    for state in optimizer.state.values():
        step = state.get("step")
        if step is not None and isinstance(step, torch.Tensor) != counts_in_tensors:
            state["step"] = torch.tensor(float(step)) if counts_in_tensors else int(step)


def orthogonalize_in_fp32() -> None:
    """Orthogonalize in fp32 in this process, for CPUs.

    DeepSpeed 0.19.8 (runtime/zero/muon/original_muon.py, ns_compute_dtype) uses fp16 on CPUs with fp16 instructions and
    fp32 on all others. After 8 steps of a tiny fp32 model the losses differed by 1.5e-5.
    """
    original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32


def _patch_stage_3(optimizer: Any) -> None:
    uses_muon: Sequence[bool] = optimizer.sub_groups_using_muon
    _mask_norms(optimizer, lambda: zip(optimizer.fp16_groups, uses_muon, strict=True))
    unscale = optimizer.unscale_and_clip_grads

    def unscale_and_clip_grads(sub_group: int, total_norm: torch.Tensor) -> None:
        unscale(sub_group, torch.zeros_like(total_norm) if uses_muon[sub_group] else total_norm)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


def _patch_stages_1_and_2(optimizer: Any) -> None:
    uses_muon = [bool(group["use_muon"]) for group in optimizer.optimizer.param_groups]
    _mask_norms(optimizer, lambda: zip(optimizer.params_in_partition, uses_muon, strict=True))
    unscale = optimizer.unscale_and_clip_grads

    def unscale_and_clip_grads(gradients: list[torch.Tensor], total_norm: torch.Tensor) -> None:
        is_muon = any(muon and tensor.grad is gradients[0] for tensor, muon in
                      zip(optimizer.single_partition_of_fp32_groups, uses_muon, strict=True))
        unscale(gradients, torch.zeros_like(total_norm) if is_muon else total_norm)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


def _mask_norms(optimizer: Any, groups: Callable[[], Any]) -> None:
    """Make the norm of Muon's groups 0, unless it is invalid: DeepSpeed marks such a norm by -1.

    Args:
        groups: returns pairs of the parameters of a group, by which the functions identify it, and whether Muon
            updates them. They are compared by identity, because a rank may have no parameter of a group.
    """
    direct, offloaded = optimizer.get_grad_norm_direct, optimizer.complete_grad_norm_calculation_for_cpu_offload

    def mask(norm: torch.Tensor, parameters: Any) -> torch.Tensor:
        is_muon = any(muon and own is parameters for own, muon in groups())
        return torch.where(norm >= 0, torch.zeros_like(norm), norm) if is_muon else norm

    optimizer.get_grad_norm_direct = lambda gradients, parameters, *others: mask(
        direct(gradients, parameters, *others), parameters)
    optimizer.complete_grad_norm_calculation_for_cpu_offload = lambda parameters: mask(
        offloaded(parameters), parameters)


def undo_step_at_construction(optimizer: Any) -> None:
    """Defect AF: undo the optimizer step that the fp16 optimizers of ZeRO stage 0 run at construction.

    DeepSpeed 0.19.8 (runtime/fp16/fused_optimizer.py, initialize_optimizer_states) runs it with zero gradients. It
    decays the master weights and counts as Adam's first step.
    """
    optimizer.optimizer.state.clear()
    optimizer.refresh_fp32_params()


def scale_loss_at_stage_0(engine: DeepSpeedEngine) -> None:
    """Defect A: scale the gradient of the loss.

    DeepSpeed 0.19.8: `DeepSpeedEngine.backward` (runtime/engine.py) scales the loss only for a ZeROOptimizer, but
    `FP16_Optimizer.step` divides by the scale in any case (upstream PR #8393). A hook on the loss scales the gradient,
    so that the reported loss remains unscaled.
    """
    optimizer = engine.optimizer
    loss_fn: Callable[..., torch.Tensor] = engine.module.loss_fn

    def scaled_loss_fn(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        loss = loss_fn(outputs, labels)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * optimizer.loss_scale_config.cur_scale)
        return loss

    engine.module.loss_fn = scaled_loss_fn


class UnscaledNorm(UpdatePart):
    """Defect W: report the norm of the unscaled gradients, which counts each parameter once.

    DeepSpeed 0.19.8 (runtime/fp16/unfused_optimizer.py, step) reports the norm of the scaled gradients. It counts tied
    gradients once per pipeline stage, and matrices of which the tensor-parallel ranks hold parts on the first of these
    ranks only, because it looks for the parameters' attributes on the gradients.
    """

    order = UNSCALED_NORM

    def __init__(self, optimizer: FP16_UnfusedOptimizer) -> None:
        self._optimizer = optimizer

    def before_update(self) -> None:
        for parameter in (p for group in self._optimizer.fp16_groups for p in group if p.grad is not None):
            parameter.grad.ds_pipe_replicated = getattr(parameter, "ds_pipe_replicated", False)
            parameter.grad.tensor_model_parallel = is_model_parallel_parameter(parameter)

    def after_update(self) -> None:
        if not self._optimizer.overflow:
            self._optimizer._global_grad_norm /= self._optimizer.loss_scale_config.cur_scale


class GrowingScale(UpdatePart):
    """Defect P: divide the gradients by the scale that the loss was multiplied by, not by the scale of the next step.

    DeepSpeed 0.19.8: `step` increases the loss scale before it divides the gradients by the scale
    (runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/fp16/fused_optimizer.py,
    runtime/fp16/unfused_optimizer.py). Each such step uses half of its gradient, unless it is clipped. ZeRO-3 and
    stage 0 also report half of the norm. Here the scale grows after the step. An overflow still changes it at once.
    """

    order = GROWING_SCALE

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, update_scale = optimizer, optimizer._update_scale
        self._update_scale = update_scale
        optimizer._update_scale = lambda skip: update_scale(skip) if skip else None

    def after_update(self) -> None:
        if not self._optimizer.overflow:
            self._update_scale(False)
