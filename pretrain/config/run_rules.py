"""Rules for combinations of a run's settings: optimizers, schedulers, monitors and flags. One row a rule.

`layout_rules.py` has the rows for parallelism, ZeRO, offload and precision. `check_rules` checks all of them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from pretrain.config import layout_rules
from pretrain.config.ds_json.optimizers import OPTIMIZERS, REQUIRED_SCHEDULER_PARAMS, SMALLEST_EPS, Optimizer
from pretrain.config.layout_rules import OFFLOAD_DEVICE, ZERO, Rule
from pretrain.config.plan import Plan
from pretrain.model.init_methods import width_multiplier
from pretrain.paths import check_folder

# DeepSpeed's GPU optimizers take these parameters, its CPU optimizers do not.
_GPU_ONLY_PARAMS = ("set_grad_none", "lr_decay", "initial_accumulator_value")
_TORCH_ADAM_PARAMS = ("lr", "betas", "eps", "weight_decay", "foreach", "fused", "torch_adam", "adam_w_mode")


def _names(is_right: Callable[[Optimizer], bool]) -> str:
    """Return the names of some optimizers: `Adam, AdamW or Lion`."""
    *names, last = (row.name for row in OPTIMIZERS.values() if is_right(row))
    return f"{', '.join(names)} or {last}"


def optimizer_of_device(run: Plan) -> Iterator[Rule]:
    """Optimizers that do not work on the device, with the offload or with ZeRO."""
    layout, device, key = run.layout, run.device.kind, "optimizer.type"
    kind, row, offloaded = layout.optimizer, OPTIMIZERS[layout.optimizer], layout.offload_optimizer != "none"
    yield Rule(offloaded and not row.on_cpu, key, f"{_names(lambda row: row.on_cpu)}, which run on the CPU",
               "or remove zero_optimization.offload_optimizer")
    yield Rule(kind == "adagrad" and layout.zero_stage > 0 and not offloaded, key,
               f'{OFFLOAD_DEVICE} "cpu" for Adagrad with ZeRO',
               "otherwise DeepSpeed rebuilds the optimizer without its parameter groups; or use AdamW")
    untested = layout.zero_stage > 0 and not row.tested_with_zero
    yield Rule(untested and not run.get("zero_allow_untested_optimizer"), key,
               problem=f"{run.get(key)} with ZeRO computes norms of parts of the matrices, so that its updates depend "
               "on the layout", remedy='use AdamW, or accept it: "zero_allow_untested_optimizer": true')
    # each stage has its own copy of the tied matrix, and updates it together with its other weights, as one flat tensor
    yield Rule(not row.elementwise and kind != "muon" and layout.pipeline_stages > 1 and run.model.tie_word_embeddings
               and (layout.zero_stage > 0 or layout.uses_bf16_optimizer), key,
               f"AdamW or another elementwise one with tied embeddings on {layout.pipeline_stages} pipeline stages",
               "the stages would update their copies of the tied matrix differently; or use one stage, or "
               "--model_overrides tie_word_embeddings=false")
    offload = f' or offload it: {OFFLOAD_DEVICE} "cpu"' if row.on_cpu else ""
    yield Rule(row.is_compiled and device == "cpu" and not offloaded, key, "an optimizer that runs on this CPU device",
               f"use AdamW{offload}")
    # runtime/engine.py, _do_sanity_check: also if fp16 is off
    yield Rule(kind == "lamb" and run.get("fp16.loss_scale"), key,
               "dynamic loss scaling (fp16.loss_scale 0) for Lamb")
    yield Rule(kind == "adamw8bit" and device != "cuda", key, "AdamW on this device: 8-bit states need CUDA")
    yield Rule(kind == "adamw8bit" and find_spec("bitsandbytes") is None, key,
               problem="AdamW8bit needs the package bitsandbytes, which is not installed",
               remedy="pip install bitsandbytes, or use AdamW")


def muon(run: Plan) -> Iterator[Rule]:
    """Layouts without Muon, and learning rates that a scheduler of the JSON would overwrite."""
    layout, is_muon = run.layout, run.layout.optimizer == "muon"
    yield Rule(is_muon and (layout.zero_stage == 0 or layout.uses_bf16_optimizer), "optimizer.type",
               "ZeRO stage 1 to 3, without fp32 accumulation at stage 1, for Muon")
    yield Rule(is_muon and layout.offload_optimizer == "nvme", OFFLOAD_DEVICE, '"cpu" or "none" for Muon')
    yield Rule(is_muon and layout.zero_stage == 3 and layout.reduce_scatter, f"{ZERO}.reduce_scatter",
               "false for Muon at ZeRO stage 3", "Muon needs complete gradients on each rank", found="true")
    for name in ("optimizer.params.muon_lr", "optimizer.params.adam_lr"):
        yield Rule(run.get(name) is not None and run.schedule is None, name,
                   problem='the "scheduler" sets one learning rate for all parameters',
                   remedy='remove the "scheduler" block, and use --lr_schedule')


def optimizer_params(run: Plan) -> Iterator[Rule]:
    """Parameters that the optimizer class that DeepSpeed selects ignores or does not take."""
    params, kind = run.get("optimizer.params", {}), run.layout.optimizer
    if OPTIMIZERS[kind].from_torch:
        return
    offloaded, torch_adam = run.layout.offload_optimizer != "none", params.get("torch_adam")
    for name in params:
        key = f"optimizer.params.{name}"
        yield Rule(name == "adam_w_mode" and kind == "adamw" and params[name] is False, key, "true with AdamW",
                   'use "type": "Adam" for weight decay inside the gradient')
        yield Rule(torch_adam and kind != "muon" and name not in _TORCH_ADAM_PARAMS, key, remedy="remove it",
                   problem='torch.optim.AdamW, which "torch_adam": true selects, does not take it')
        yield Rule(name in ("foreach", "fused") and not torch_adam, key, remedy="remove it",
                   problem='it needs "torch_adam": true')
        yield Rule(name == "fp32_optimizer_states" and not offloaded, key, remedy="remove it",
                   problem="it has no effect without offload_optimizer")
        yield Rule(name == "fp32_optimizer_states" and params[name] and run.get("bf16.bf16_optimizer_states"), key,
                   'false with "bf16.bf16_optimizer_states"', "otherwise DeepSpeed ignores it; remove one of the two")
        yield Rule(name in _GPU_ONLY_PARAMS and offloaded, key, remedy="remove it",
                   problem="DeepSpeed's CPU optimizers do not take it")


def scheduler_params(run: Plan) -> Iterator[Rule]:
    """Parameters of the JSON's scheduler that are missing or contradict each other."""
    kind, params = run.get("scheduler.type"), run.get("scheduler.params", {})
    for name in REQUIRED_SCHEDULER_PARAMS.get(kind, ()):
        yield Rule(params.get(name) is None, f"scheduler.params.{name}",
                   problem=f"the value is missing, and {kind} needs it")
    highest = params.get("cycle_max_lr", 0)
    yield Rule(params.get("cycle_min_lr", 0) > highest, "scheduler.params.cycle_min_lr",
               f"at most cycle_max_lr, {highest}")
    total = params.get("total_num_steps")
    yield Rule(total is not None and params.get("warmup_num_steps", 0) >= total, "scheduler.params.warmup_num_steps",
               f"less than total_num_steps, {total}")


def torch_optimizer_params(run: Plan) -> Iterator[Rule]:
    """Values that torch.optim's constructors and steps reject."""
    params = run.get("optimizer.params", {})
    yield Rule(params.get("nesterov") and (not params.get("momentum") or params.get("dampening")),
               "optimizer.params.nesterov", "false without momentum, or with dampening")
    low, high = params.get("etas", (0.5, 1.2))
    yield Rule(not low < 1 < high, "optimizer.params.etas", "one value below 1 and one above 1")
    eps = params.get("eps")
    yield Rule(isinstance(eps, list) and eps[0] < SMALLEST_EPS, "optimizer.params.eps",  # Adafactor
               f"a first number from {SMALLEST_EPS}", "its square is no normal number in fp32: weights without a "
               "gradient would become NaN")
    yield Rule(params.get("foreach") and params.get("fused"), "optimizer.params.fused",
               problem="foreach and fused exclude each other", remedy="remove one of them")
    yield Rule(params.get("capturable") and run.device.kind == "cpu", "optimizer.params.capturable", "false on a CPU")


def monitors_and_timers(run: Plan) -> Iterator[Rule]:
    """Monitors whose package is not installed, and timers that fail."""
    stages = run.layout.pipeline_stages
    for name in ("wall_clock_breakdown", "flops_profiler.enabled"):
        yield Rule(run.get(name) and stages > 1, name, f"false with {stages} pipeline stages",
                   "DeepSpeed's timers crash there")
    yield Rule(run.get("flops_profiler.enabled") and run.args.compile_blocks, "flops_profiler.enabled",
               "false with --compile_blocks", "the profiler measures each layer by a hook, and a compiled block is one "
               "graph without them; leave one of the two out")
    for where, package, is_on in (
            *((f"{name}.enabled", package, run.get(f"{name}.enabled")) for name, package in
              (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml"))),
            ("--trackio", "trackio", run.args.trackio is not None)):
        yield Rule(is_on and find_spec(package) is None, where, remedy=f"pip install {package}",
                   problem=f"it needs the package {package}, which is not installed")
    yield Rule(run.get("aio.use_gds") and run.device.kind == "cpu", "aio.use_gds", "false on a CPU")


def determinism(run: Plan) -> Iterator[Rule]:
    """Variables and kernels with which a run on GPUs is not bit-reproducible."""
    if not run.args.deterministic or run.device.kind != "cuda":
        return
    workspace, algorithms = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_ALGO", "")
    yield Rule(workspace not in (None, ":4096:8", ":16:8"), "CUBLAS_WORKSPACE_CONFIG", ":4096:8 or :16:8",
               "with other workspaces, products of matrices are not reproducible; unset the variable", found=workspace)
    yield Rule("NVLS" in algorithms.upper() and not algorithms.startswith("^"), "NCCL_ALGO", "Ring or Tree",
               "with NVLS, the order of sums differs between runs; unset the variable", found=algorithms)
    yield Rule(run.args.compile_blocks and Version(version("torch")) < Version("2.10"), "--deterministic",
               problem="with --compile_blocks it needs torch 2.10: older versions measure which kernels are faster",
               remedy="leave one of the two flags out")


def writable_folders(run: Plan) -> Iterator[Rule]:
    """Folders of offload, monitors and profiler on this machine. Without the check, DeepSpeed fails after the start."""
    for block in ("offload_optimizer", "offload_param"):
        key = f"{ZERO}.{block}.nvme_path"
        if run.get(f"{ZERO}.{block}.device") == "nvme":
            folder = Path(run.get(key)).parent  # the last part is the run's own folder
            yield Rule(not folder.is_dir(), key, problem=f"there is no folder {folder}", remedy="make it first")
            check_folder(folder, run.file.where(key))
    for name in ("tensorboard", "csv_monitor"):
        if run.get(f"{name}.enabled"):
            check_folder(Path(run.get(f"{name}.output_path")), run.file.where(f"{name}.output_path"))
    output_file = run.get("flops_profiler.output_file")
    if run.get("flops_profiler.enabled") and output_file:
        check_folder(Path(output_file).parent, run.file.where("flops_profiler.output_file"))


def numbers_of_the_device(run: Plan) -> Iterator[Rule]:
    """TF32 on devices and in precisions without it."""
    layout, device, tf32 = run.layout, run.device, run.args.tf32
    yield Rule(tf32 and (device.kind != "cuda" or layout.precision != "fp32"), "--tf32",
               "an fp32 run on cuda: nothing else multiplies in TF32", "leave --tf32 out",
               found=f"a run in {layout.precision} on {device.kind}")
    yield Rule(tf32 and not device.bf16, "--tf32",  # both came with compute capability 8.0
               problem="this GPU has no TF32: it would multiply in fp32", remedy="leave --tf32 out")


def length_of_run(run: Plan) -> Iterator[Rule]:
    """Sequences beyond the model's positions, and a step beyond the run's last one."""
    args, most = run.args, run.model.max_positions
    # a document would differ from the same one alone
    yield Rule(args.document_attention and args.seq_length > most, "--document_attention",
               f"at most {most} tokens, the model's {run.model.key('max_positions')}",
               "beyond them, the frequencies depend on the length of the sample; use a smaller --seq_length, or "
               "another rope_type", found=f"--seq_length {args.seq_length} with dynamic RoPE scaling")
    yield Rule(args.exit_step is not None and args.exit_step > run.train_steps, "--exit_step",
               f"at most the run's {run.train_steps} steps")


def clipping_and_noise_scale(run: Plan) -> Iterator[Rule]:
    """Layouts in which gradients cannot be clipped by value, or norms of gradients cannot be compared."""
    args, layout, is_muon = run.args, run.layout, run.layout.optimizer == "muon"
    if args.gradient_value_clipping:
        yield Rule(is_muon, "--gradient_value_clipping", "another optimizer", found="the optimizer Muon",
                   remedy="Muon replaces the gradients before they could be clipped")
        yield Rule(layout.offload_optimizer == "nvme", "--gradient_value_clipping", "cpu, or no offload",
                   "the gradients leave the memory before they could be clipped", found="offload_optimizer to nvme")
    yield Rule(not args.adaptive_clipping and args.adaptive_clipping_window != type(args).adaptive_clipping_window,
               "--adaptive_clipping_window", problem="it has no effect without --adaptive_clipping",
               remedy="add --adaptive_clipping PERCENTILE, such as 90")
    flag = "--noise_scale_interval"
    if not args.noise_scale_interval:
        return
    yield Rule(layout.gradient_accumulation_steps * layout.data_parallel_size == 1, flag,
               "at least two, whose gradients differ",
               "use a smaller --micro_batch_size and more --gradient_accumulation_steps",
               found="one micro-batch in a step")
    yield Rule(is_muon, flag, "another optimizer", found="the optimizer Muon",
               remedy="DeepSpeed reports the norm of Muon's updates, not that of the gradients")
    yield Rule(args.gradient_value_clipping, flag, remedy="use one of the two flags",
               problem="--gradient_value_clipping changes the gradient before its norm is computed")
    yield Rule(layout.pipeline_stages > 1 and run.model.tie_word_embeddings, flag,
               "untied embeddings, or one stage", "each stage has only a part of the gradient of the tied matrix",
               found=f"tied embeddings on {layout.pipeline_stages} pipeline stages")


def early_stopping(run: Plan) -> Iterator[Rule]:
    """Early stopping without evaluations. `validate` also checks that there is validation data."""
    args = run.args
    yield Rule(args.early_stopping_min_delta and not args.early_stopping_patience, "--early_stopping_min_delta",
               problem="it has no effect without --early_stopping_patience", remedy="add --early_stopping_patience N")
    yield Rule(args.early_stopping_patience and not args.eval_interval, "--early_stopping_patience",
               problem="the run has no evaluations before its end", remedy="add --eval_interval N")


def recomputation(run: Plan) -> Iterator[Rule]:
    """Two settings of recomputation, parts of it that exclude each other, and more parts than there are."""
    args, layout, model = run.args, run.layout, run.model
    part, every, tiles, interval = args.recompute, args.recompute_every, args.mlp_tiles, \
        layout.activation_checkpoint_interval
    yield Rule(part is not None and interval, "pipeline.activation_checkpoint_interval", "one of the two",
               "both say what is recomputed; leave --recompute out, or set the key to 0",
               found=f"{interval} with --recompute {part}")
    yield Rule(every > 1 and part in (None, "none"), "--recompute_every", "1",
               "add --recompute blocks, attention or mlp", found=f"{every} without a part that is recomputed")
    yield Rule(every > model.num_layers, "--recompute_every", f"at most {model.num_layers}, the model's layers")
    yield Rule(tiles > 1 and part == "mlp", "--mlp_tiles", "1, or another part",
               "tiles are recomputed already; leave --recompute out, or use --recompute blocks",
               found=f"{tiles} with --recompute mlp")
    yield Rule(tiles > 1 and model.num_experts, "--mlp_tiles", "1", found=f"{tiles} with a model of experts",
               remedy="the experts of each token are chosen among all tokens of a micro-batch")
    tokens = args.seq_length * layout.micro_batch_size
    yield Rule(tiles > tokens, "--mlp_tiles", f"at most {tokens}, the tokens of a micro-batch")
    # the other part of most models keeps the same input on the device
    offload = "activation_checkpointing.cpu_checkpointing"
    yield Rule(run.get(offload) and part in ("attention", "mlp"), offload, f"false with --recompute {part}",
               "it keeps the inputs of complete blocks in host memory: use --recompute blocks")


def mup(run: Plan) -> Iterator[Rule]:
    """Models and optimizers whose widths or learning rates muP would not scale correctly."""
    width, model, flag = run.args.mup_base_width, run.model, "--mup_base_width"
    if width is None:
        return
    heads = model.num_heads / width_multiplier(model, width)
    # the smallest base width with a whole number of heads, if hidden_size is a multiple of num_heads
    smallest = f"{model.hidden_size / model.num_heads:g}"
    yield Rule(heads < 1 or heads != int(heads), flag, f"a multiple of {smallest}: the base model has the same head "
               f"size ({model.head_size}), and a whole number of heads")
    yield Rule(model.tie_word_embeddings, flag, problem="the output matrix is that of the embeddings, but muP needs "
               "another initial deviation and learning rate for it",
               remedy="give --model_overrides tie_word_embeddings=false")
    yield Rule(model.embedding_scale != 1, flag, problem=f"{model.architecture} multiplies the embeddings by "
               f"{model.embedding_scale:g}, which depends on the width", remedy="leave the flag out")
    yield Rule(not OPTIMIZERS[run.layout.optimizer].scale_free, "optimizer.type",
               f"{_names(lambda row: row.scale_free)} with --mup_base_width",
               "the learning rates of muP are different for other optimizers")
    yield Rule(run.schedule is None, "scheduler", problem="it sets one learning rate for all parameters, but "
               "--mup_base_width needs several", remedy='remove the "scheduler" block, and use --lr_schedule')


def of_model(run: Plan) -> Iterable[Rule]:
    """Settings that the code of the model excludes."""
    return run.model.implementation.rules(run)


SUBJECTS = (
    of_model, layout_rules.degrees_together, layout_rules.parts_of_matrices, layout_rules.models_with_experts,
    layout_rules.expert_parallelism, layout_rules.pipeline_partition, layout_rules.precision_of_device,
    layout_rules.zero_and_offload, layout_rules.gradients_and_master_weights, optimizer_of_device, muon,
    optimizer_params, layout_rules.loss_scale, layout_rules.nvme_here, layout_rules.operators_without_nvcc,
    layout_rules.nvme_buffer_size, scheduler_params, torch_optimizer_params, monitors_and_timers, writable_folders,
    numbers_of_the_device, length_of_run, clipping_and_noise_scale, early_stopping, recomputation,
    layout_rules.sequence_parallelism, mup, determinism)
_OF_THIS_MACHINE = (layout_rules.nvme_here, writable_folders)


def check_rules(run: Plan, *, this_machine: bool = True) -> None:
    """Raise ConfigError for the first broken rule.

    Without `this_machine`, the libraries and folders of this machine are not checked.
    """
    for subject in SUBJECTS:
        if this_machine or subject not in _OF_THIS_MACHINE:
            check_each(subject(run), run)


def check_each(rules: Iterable[Rule], run: Plan) -> None:
    """Raise ConfigError for the first broken rule."""
    for rule in rules:
        if rule.is_broken:
            raise rule.error(run)
