"""Forward and backward time of each layer on this device, for `"partition_method": "time"`.

The pipeline stages depend on the times, so the times are made repeatable where it matters:

- Layers of the same class and settings, such as all blocks of most models, are measured once and have equal times.
- All ranks use the times of rank 0.
- run.json records the times. A resume under the same conditions (model, micro-batch, precision, device ...) uses the
  recorded ones, so that its stages are the same and it is bit-exact. Otherwise the layers are measured again, and the
  checkpoint is loaded as one of another layout.

Initial weights, samples and losses do not depend on the stages.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from pretrain.active_extensions import change_model, model_flags
from pretrain.config.plan import Plan
from pretrain.distributed.device import cpu_name
from pretrain.distributed.parallel_groups import ParallelGroups
from pretrain.engine.attachments import attachments
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.fused_loss import LossTerms
from pretrain.model.layer_specs import build_specs, compile_blocks
from pretrain.model.layers.vocabulary import TrainingLoss
from pretrain.model.parameters import DTYPES
from pretrain.model.partition import BY_TIME
from pretrain.model.run_layers import run_layers

_WARM_UPS, _REPETITIONS = 2, 7  # fixed: tensor-parallel ranks measure a layer together
_DIGITS = 3  # of a time; the rest is noise


def with_layer_times(plan: Plan, groups: ParallelGroups, recorded: dict[str, Any] | None) -> Plan:
    """Return the plan with the times of its layers, if its pipeline stages depend on them; collective.

    Args:
        recorded: `layer_times_record` of the run's newest start; only rank 0's value is used.
    """
    layout = plan.layout
    if layout.partition_method != BY_TIME or layout.pipeline_stages == 1 or layout.layer_times:
        return plan
    wanted = [_usable(recorded, plan) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(wanted, src=0)
    if wanted[0] is None:
        wanted = [_measure(plan, groups)]
        dist.broadcast_object_list(wanted, src=0)
    return replace(plan, layout=replace(layout, layer_times=tuple(wanted[0] or ())))


def plan_as_built(plan: Plan, engine: DeepSpeedEngine) -> Plan:
    """Return the plan with the layers' times of the engine that was built from it."""
    return replace(plan, layout=replace(plan.layout, layer_times=attachments(engine).layer_times))


def layer_times_record(plan: Plan) -> dict[str, Any] | None:
    """Return what run.json records of the layers' times; None if the pipeline stages do not depend on them."""
    if not plan.layout.layer_times:
        return None
    return {"nanoseconds": list(plan.layout.layer_times), "conditions": _conditions(plan)}


def _conditions(plan: Plan) -> dict[str, Any]:
    """Return everything on which the times depend, as JSON."""
    layout, accelerator = plan.layout, get_accelerator()
    device = cpu_name() if accelerator.device_name() == "cpu" else torch.cuda.get_device_name()
    return {"device": device, "precision": layout.precision, "micro_batch_size": layout.micro_batch_size,
            "seq_length": layout.seq_length, "tensor_parallel_size": layout.tensor_parallel_size,
            "recompute": str(layout.recomputation), "document_attention": layout.document_attention,
            "plain_operators": plan.args.plain_operators, "compile_blocks": plan.args.compile_blocks,
            **model_flags(plan.args),
            "model": plan.model.hf_config}


def _usable(recorded: dict[str, Any] | None, plan: Plan) -> list[int] | None:
    """Return the recorded times if they were measured under this plan's conditions."""
    if not isinstance(recorded, dict) or recorded.get("conditions") != _conditions(plan):
        return None
    times = recorded.get("nanoseconds")
    is_complete = isinstance(times, list) and all(isinstance(each, int) and each >= 0 for each in times)
    return times if is_complete and times and len(times) == len(build_specs(plan.model)) else None


def _measure(plan: Plan, groups: ParallelGroups) -> list[int]:
    """Return the nanoseconds of each layer. All ranks measure at the same time, as they also train."""
    layout = plan.layout
    loss = TrainingLoss(LossTerms(label_smoothing=plan.args.label_smoothing, z_loss=plan.args.z_loss),
                        plain_operators=plan.args.plain_operators)
    specs = build_specs(plan.model, ends_in_loss=True, plain_operators=plan.args.plain_operators, loss=loss,
                        recompute=layout.recomputation, groups=groups)
    inputs = _Inputs(plan)
    known: dict[tuple[Any, ...], int] = {}
    times = []
    for index, spec in enumerate(specs):
        kind = _kind(spec, is_last=index == len(specs) - 1)
        if kind not in known:
            known[kind] = _layer_nanoseconds(spec, plan, inputs, is_last=index == len(specs) - 1)
        times.append(known[kind])
    get_accelerator().empty_cache()
    return times


def _kind(spec: LayerSpec, *, is_last: bool) -> tuple[Any, ...]:
    """Return a key that is equal for layers that compute the same: class, shapes, and attributes of a block."""
    with torch.device("meta"):
        layer = spec.build()
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    window = getattr(getattr(layer, "attention", None), "window", 0)
    return (spec.typename.__name__, is_last, shapes, window, getattr(layer, "recompute", ""))


class _Inputs:
    """A random micro-batch, and the hidden states that the first layer makes from it."""

    def __init__(self, plan: Plan) -> None:
        self.device = torch.device(get_accelerator().current_device_name())
        shape, generator = (plan.layout.micro_batch_size, plan.layout.seq_length), torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(0, plan.model.vocab_size, shape, generator=generator)
        self.tokens_BT = tokens_BT.to(self.device)
        weights_BT = torch.full(shape, 1.0 / (shape[0] * shape[1]), device=self.device)
        self.labels = (self.tokens_BT, weights_BT)
        positions_BT = torch.arange(shape[1], device=self.device).expand(shape).contiguous()
        self.documents = Documents(positions_BT) if plan.layout.document_attention else None
        self.hidden_BTD: torch.Tensor | None = None  # under tensor parallelism a shard of the positions


def _layer_nanoseconds(spec: LayerSpec, plan: Plan, inputs: _Inputs, *, is_last: bool) -> int:
    """Build one layer, measure its forward and backward pass, and remove it."""
    with inputs.device:
        module: nn.Module = spec.build()
    module.to(device=inputs.device, dtype=DTYPES[plan.layout.precision]).train()
    with torch.no_grad():
        for parameter in module.parameters():  # memory that is not set may hold denormal numbers, which are slow
            parameter.normal_(0.0, 0.02)
    change_model(module, plan)
    if plan.args.compile_blocks:
        compile_blocks(module, seq_length=plan.layout.seq_length, device=inputs.device)
    if inputs.hidden_BTD is None:  # the first layer
        inputs.hidden_BTD = module(inputs.tokens_BT).detach()
        return _nanoseconds(lambda: _train(module(inputs.tokens_BT)))
    x = inputs.hidden_BTD.clone().requires_grad_()
    if is_last:  # the output of the pipeline, and the loss of it
        head = partial(spec.forward_fn, module) if isinstance(spec, TiedLayerSpec) else module
        return _nanoseconds(lambda: _train(head(head(x), inputs.labels)))
    assert not isinstance(spec, TiedLayerSpec)
    recompute = plan.layout.recomputation
    return _nanoseconds(lambda: _train(run_layers([module], x, inputs.documents, recompute)))


def _train(output: torch.Tensor) -> None:
    output.backward(torch.ones_like(output))


def _nanoseconds(run: Callable[[], None]) -> int:
    """Return the median time of a call, rounded."""
    accelerator, times = get_accelerator(), []
    for _ in range(_WARM_UPS + _REPETITIONS):
        accelerator.synchronize()
        start = time.perf_counter_ns()
        run()
        accelerator.synchronize()
        times.append(time.perf_counter_ns() - start)
    return int(float(f"{median(times[_WARM_UPS:]):.{_DIGITS}g}"))
