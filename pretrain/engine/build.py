"""Build a DeepSpeed engine from a plan: ZeRO-0/1 as a PipelineModule of one or more stages, ZeRO-2/3 as a plain module.

Only this file and steps.py distinguish between PipelineModule and plain module.
"""

import contextlib
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch.optim.lr_scheduler import LambdaLR

from pretrain.active_extensions import change_model, patch_engine
from pretrain.config.model_of_run import initialization_of, undecayed_names
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import gather
from pretrain.distributed.parallel_groups import ParallelGroups
from pretrain.distributed.process import keep_freed_memory
from pretrain.distributed.requirements import shortcut, workarounds
from pretrain.engine.attachments import Attachments, attach
from pretrain.engine.chosen_operators import operators_on_cuda
from pretrain.engine.expert_parallelism import (
    announced_experts,
    mark_experts,
    mark_partitioned_experts,
    with_expert_groups,
)
from pretrain.engine.layer_times import with_layer_times
from pretrain.engine.optimizer import (
    group_settings,
    is_matrix,
    made_here,
    mup_parameter_groups,
    parameter_groups,
)
from pretrain.engine.parallelism import Mpu, create_mpu, create_parallel_groups, engine_config
from pretrain.engine.patches.apply import apply_patches
from pretrain.engine.patches.late_skip import late_skip
from pretrain.engine.patches.monitors import patch_flops_profiler, survive_failing_monitors
from pretrain.engine.patches.zero import (
    forget_group_of_earlier_engine,
    keep_dtype_of_partitions,
    skip_reduction_on_one_rank,
)
from pretrain.engine.prepare import set_deterministic
from pretrain.engine.recipe import add_recipe, add_router_losses
from pretrain.engine.spikes import SpikeWindows
from pretrain.engine.update import Update
from pretrain.errors import ConfigError
from pretrain.model.init import initialize_parameters
from pretrain.model.init_methods import width_multiplier
from pretrain.model.kernels.fused_loss import LossTerms
from pretrain.model.layer_specs import as_module, as_pipeline, compile_blocks, gather_complete_blocks
from pretrain.model.operators import choose_operators
from pretrain.model.parameters import check_dtype
from pretrain.own_code import own_loss


@contextlib.contextmanager
def deepspeed_output(level: str) -> Iterator[None]:
    """Set the level of DeepSpeed's logger: debug, info, warning or error. Above info, also discard output to stdout."""
    deepspeed.utils.logger.setLevel(getattr(logging, level.upper()))
    with contextlib.ExitStack() as stack:
        if level not in ("debug", "info"):
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def emulate_fp16() -> None:
    """Make DeepSpeed accept fp16 on a device without fp16 support; torch emulates it slowly."""
    type(get_accelerator()).is_fp16_supported = lambda self: True


def _build_module(plan: Plan, groups: ParallelGroups, mpu: Mpu | None) -> torch.nn.Module:
    plain_operators, recompute = plan.args.plain_operators, plan.layout.recomputation
    terms = LossTerms(label_smoothing=plan.args.label_smoothing, z_loss=plan.args.z_loss,
                      own=own_loss(plan.args.loss))
    if plan.layout.uses_pipeline_module:
        return as_pipeline(plan.model, num_stages=plan.layout.pipeline_stages, seq_length=plan.args.seq_length,
                           partition_method=plan.layout.partition_method, layer_times=plan.layout.layer_times,
                           recompute=recompute, plain_operators=plain_operators, loss_terms=terms, groups=groups)
    init = deepspeed.zero.Init(config_dict_or_path=engine_config(plan.ds_config), mpu=mpu,
                               enabled=plan.layout.zero_stage == 3,
                               data_parallel_group=None if mpu is None else mpu.sequence_data.handle)
    mark_partitioned_experts(init, groups.expert)
    with init:
        return as_module(plan.model, recompute=recompute, plain_operators=plain_operators, loss_terms=terms,
                         groups=groups)


def _scheduler(plan: Plan) -> Callable[[torch.optim.Optimizer], LambdaLR] | None:
    """Return a factory for the plan's schedule, as DeepSpeed expects; None if the JSON has its own scheduler."""
    schedule = plan.schedule
    if schedule is None:
        return None
    return lambda optimizer: LambdaLR(optimizer, lambda step: schedule(step) / schedule.peak)


def build_engine(plan: Plan, *, initialize: bool = True,
                 recorded_layer_times: dict[str, Any] | None = None) -> DeepSpeedEngine:
    """Build the engine. The process group must exist.

    Its initial weights depend only on (seed, parameter name). With `initialize` false they are not set: the caller
    loads all weights.

    `recorded_layer_times`: the times of layers of the run's newest start (monitor/read_run_folder.py), if it has one.
    """
    if plan.args.emulate_fp16:
        emulate_fp16()
    set_deterministic(plan.args.deterministic)
    choose_operators(plan)
    torch.backends.cuda.matmul.allow_tf32 = plan.args.tf32
    forget_group_of_earlier_engine()
    with workarounds():
        keep_dtype_of_partitions()
    groups = create_parallel_groups(plan.layout)
    plan = with_layer_times(plan, groups, recorded_layer_times)
    mpu = create_mpu(plan.layout, groups)
    module = _build_module(plan, groups, mpu)
    change_model(module, plan)
    add_router_losses(module, plan)
    if initialize:
        initialize_parameters(module, plan.model, seed=plan.args.seed, how=initialization_of(plan.args))
    # Each rank has its own dropout masks; DeepSpeed starts all pipeline stages with the same RNG state (defect G).
    torch.manual_seed(plan.args.seed + 1 + torch.distributed.get_rank())
    if plan.layout.zero_stage == 3 and (plan.args.compile_blocks or groups.tensor.size > 1):
        gather_complete_blocks(module)
    survive_failing_monitors()
    make_optimizer, ds_config = made_here(plan)
    mark_experts(module, groups.expert)
    with announced_experts(module):
        try:
            engine, *_ = deepspeed.initialize(model=module, model_parameters=_parameter_groups(module, plan),
                                              config=engine_config(ds_config), optimizer=make_optimizer,
                                              lr_scheduler=_scheduler(plan), mpu=mpu)
        except RuntimeError as error:  # DeepSpeed 0.19.8's CPUAdam raises it from the operator's error
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise
    check_dtype(engine.module, plan.layout.precision)
    own = Attachments(
        Update(engine), group_settings=group_settings(engine, plan.ds_config), layer_times=plan.layout.layer_times,
        spikes=SpikeWindows(length=plan.args.spike_window, threshold=plan.args.spike_threshold))
    attach(engine, own)
    with workarounds():
        apply_patches(engine, own.update)
    with shortcut("no reduction on one rank"):
        skip_reduction_on_one_rank(engine)
    with shortcut("updates skipped on the device"):
        own.update.late = late_skip(engine)
    patch_engine(engine, plan.args)
    add_recipe(engine, plan.args)
    patch_flops_profiler(engine)
    if engine.device.type == "cpu":
        keep_freed_memory()  # not earlier: the temporaries of the construction are returned to the system
    own.operators = operators_on_cuda(engine, plan)
    if plan.args.compile_blocks:
        compile_blocks(engine.module, seq_length=plan.args.seq_length, device=engine.device)
        own.only_shape = plan.layout.micro_batch_size, plan.args.seq_length
    return engine


def _parameter_groups(module: torch.nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with --mup_base_width muP's. Raises ConfigError."""
    parameters, base_width = list(module.named_parameters()), plan.args.mup_base_width
    undecayed = undecayed_names(plan.args.no_weight_decay, plan.model)
    if base_width is None:
        groups = parameter_groups(parameters, undecayed, decay_vectors=plan.args.decay_vectors)
    else:
        groups = mup_parameter_groups(parameters, multiplier=width_multiplier(plan.model, base_width),
                                      learning_rate=plan.ds_config["optimizer"]["params"]["lr"], undecayed=undecayed,
                                      decay_vectors=plan.args.decay_vectors)
    _check_groups([parameter for _, parameter in parameters], groups, plan)
    return with_expert_groups(groups)


def _check_groups(parameters: list[torch.nn.Parameter], groups: list[dict[str, Any]], plan: Plan) -> None:
    """Raise ConfigError on every rank if a pipeline stage lacks a kind of parameters that others have; collective.

    The number of non-empty groups may differ (patches/pipeline.py, reduce_norm_once), but not with DeepSpeed 0.19.8's
    FP16_UnfusedOptimizer (runtime/fp16/unfused_optimizer.py, step): it reduces the norm of each group, and the
    pipeline stages would wait for each other forever.
    """
    kinds = gather(sorted({is_matrix(parameter) for parameter in parameters}))
    if any(kinds_of_rank != kinds[0] for kinds_of_rank in kinds):
        raise ConfigError("pipeline.partition_method", problem="it leaves a pipeline stage without a block",
                          remedy='use "partition_method": "uniform", or fewer "stages"')
    layout = plan.layout
    unfused = layout.zero_stage == 0 and layout.precision == "fp16" and \
        (plan.ds_config["optimizer"]["params"].get("torch_adam") or layout.optimizer not in ("adam", "adamw"))
    counts = gather(sum(bool(group["params"]) for group in groups))
    if unfused and len({*counts}) > 1:
        raise ConfigError("--no_weight_decay" if plan.args.mup_base_width is None else "--mup_base_width",
                          problem="the pipeline stages have different parameter groups, which DeepSpeed does not "
                          "support in fp16 at ZeRO stage 0", remedy="use ZeRO stage 1, or bf16")


def remove_swap_files(plan: Plan) -> None:
    """Remove the swap files of NVMe offload on this host; checkpoints do not need them."""
    for block in ("offload_optimizer", "offload_param"):
        path = (plan.ds_config.get("zero_optimization", {}).get(block) or {}).get("nvme_path")
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
