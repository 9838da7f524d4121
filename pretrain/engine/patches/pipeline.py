"""Defects B, K and AG: wrong gradients and wrong clipping between pipeline stages; a norm that never completes; and
checkpoints of bf16 pipelines without ZeRO.

Guarded by tests/distributed/test_upstream.py, test_b_*, test_k_* and
test_bf16_stage_0_pipeline_checkpoint_can_be_loaded, and by tests/engine/test_mup.py (reduce_norm_once).
"""

from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import (
    is_model_parallel_parameter,
)
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

from pretrain.distributed.collectives import gather


def is_counted(engine: DeepSpeedEngine, parameter: torch.nn.Parameter) -> bool:
    """Return whether this rank counts the parameter in a sum over the pipeline stages and tensor-parallel ranks.

    Of copies on several of these ranks, one counts: tied weights on the first pipeline stage that has them, and what
    the tensor-parallel ranks hold completely on the first of them. DeepSpeed's optimizers have the same rule.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return is_model_parallel_parameter(parameter) or bwc_tensor_model_parallel_rank(engine.mpu) == 0


def reduce_tied_gradients(engine: PipelineEngine) -> None:
    """Defect B: sum the gradients of tied weights over the pipeline stages, wherever ZeRO-1 keeps them.

    DeepSpeed 0.19.8: `PipelineEngine._exec_reduce_tied_grads` (runtime/pipe/engine.py) sums `weight.grad`, but ZeRO-1
    keeps the gradient elsewhere if it accumulates in another dtype (runtime/zero/stage_1_and_2.py,
    get_param_gradient_attribute).
    """

    def exec_reduce_tied_grads(self: PipelineEngine) -> None:
        for weight, group in self.module.get_tied_weights_and_groups():
            if self.using_bf16_optimizer:
                grad = weight._hp_grad
            elif hasattr(self.optimizer, "get_param_gradient_attribute"):
                grad = self.optimizer.get_param_gradient_attribute(weight)
            else:
                grad = weight.grad
            if grad is not None:
                dist.all_reduce(grad, group=group)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: exec_reduce_tied_grads}


def divide_gradients_at_the_loss(engine: PipelineEngine) -> None:
    """Defect AG: divide the gradients by the number of micro-batches once.

    DeepSpeed 0.18.9 to 0.19.3: `_backward_prologue_per_tensor` (runtime/engine.py) divides the gradients of the output
    of every pipeline stage, so that those of earlier stages are divided several times. 0.19.4 and 0.19.5 do so at the
    output of the last stage only, but not for weights that the loss function uses.
    """
    engine._backward_prologue_per_tensor = lambda grad: grad
    loss_fn = engine.module.loss_fn

    def divided_loss_fn(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_fn(outputs, labels)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad / engine.gradient_accumulation_steps())
        return loss

    engine.module.loss_fn = divided_loss_fn


def clip_fp32_by_global_norm(engine: DeepSpeedEngine) -> None:
    """Defect K: clip fp32 gradients at ZeRO stage 0 by the norm over pipeline stages and tensor-parallel ranks.

    DeepSpeed 0.19.8: `clip_grad_norm_` (runtime/utils.py) counts only the parameters of the first pipeline stage. It
    treats all others as replicas, because get_model_parallel_rank returns the pipeline stage. Clipping then depends on
    the layout. Besides, `get_global_grad_norm` returns None, and without clipping no norm is computed. Here it is
    always computed and reported. One call of torch computes the norms of all gradients: DeepSpeed's
    get_global_norm_of_tensors makes four for each of them.
    """
    engine.optimizer.clip_grad = engine.gradient_clipping()  # under the name that DeepSpeed's optimizers have
    parameters = [(p, is_counted(engine, p)) for p in engine.module.parameters()]
    ranks = engine.mpu.get_model_parallel_group()

    def clip() -> None:
        gradients = [p.grad for p, _ in parameters if p.grad is not None]
        norms = torch._foreach_norm([p.grad for p, counted in parameters if counted and p.grad is not None])
        squared = torch.stack([torch.zeros((), device=engine.device), *norms]).square().sum()
        if dist.get_world_size(ranks) > 1:
            dist.all_reduce(squared, group=ranks)
        norm = squared.sqrt()
        engine.optimizer._global_grad_norm = norm  # the engine reads it after the step
        max_norm = engine.optimizer.clip_grad
        if max_norm > 0:  # as in DeepSpeed's clip_tensors_by_global_norm, which reads the factor from the device
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    engine.clip_fp32_gradients = clip  # called by the engine if clipping is on, otherwise by patches/skip.py


def has_different_groups(engine: PipelineEngine) -> bool:
    """Return whether the pipeline stages have different numbers of parameter groups, without empty ones; collective.

    By torch's function: DeepSpeed 0.19.8 (utils/comms_logging.py, calc_bw_log) ends the process with exit code 0 if
    comms_logger logs `deepspeed.comm.all_gather_object`.
    """
    return len({*gather(len(engine.optimizer.param_groups))}) > 1


def reduce_norm_once(engine: PipelineEngine) -> None:
    """Sum the gradient norm of all parameter groups over the pipeline stages at once, instead of each group's.

    DeepSpeed 0.19.8: `scaled_global_norm` (runtime/zero/stage_1_and_2.py) reduces the norm of each non-empty group.
    Stages with different groups wait for each other forever. With muP, only the first stage has embeddings.
    """
    optimizer = engine.optimizer
    norm_of_stage, reduce_over_stages = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        try:
            squared: torch.Tensor = norm_of_stage(norm_type).float() ** 2
        finally:
            optimizer._model_parallel_all_reduce = reduce_over_stages
        reduce_over_stages(tensor=squared, op=dist.ReduceOp.SUM)
        return squared.sqrt()

    optimizer.scaled_global_norm = scaled_global_norm


def load_checkpoint(engine: DeepSpeedEngine, folder: Path, tag: str) -> dict[str, Any]:
    """Load with `engine.load_checkpoint` and return the client state. RuntimeError if nothing is loaded.

    DeepSpeed 0.19.8 (runtime/engine.py, _load_checkpoint) passes the wrong file to BF16_Optimizer at ZeRO stage 0. The
    load fails with KeyError: 0. In this case a second call loads the optimizer.
    """
    bf16_at_stage_0 = isinstance(engine.optimizer, BF16_Optimizer) and not engine.zero_optimization()
    path, client_state = engine.load_checkpoint(str(folder), tag=tag, load_optimizer_states=not bf16_at_stage_0)
    if path is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {folder / tag}")
    if bf16_at_stage_0 and not engine._load_zero_checkpoint(str(folder), tag):
        raise RuntimeError(f"DeepSpeed found no optimizer files in {folder / tag}")
    return client_state
