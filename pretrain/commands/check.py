"""Validate a run like `ds-pretrain train`, but do not train.

Exit codes: 0 the run is valid, and its plan is printed; 2 the run is rejected, with one line of explanation.
"""

import os
import sys
from dataclasses import replace

from pretrain.active_extensions import precisions, prepare_extensions
from pretrain.checkpoint.load.start import check_start
from pretrain.cli import Parser, next_line, text, whole_number
from pretrain.commands.next_command import after_check, before_check
from pretrain.config.flags.parse import parse_arguments, parse_before_run
from pretrain.config.json_rates import rate_of
from pretrain.config.plan import Plan, batches_text
from pretrain.config.schedule import rates_text, schedule_text
from pretrain.data.samples.blend import BlendedSamples
from pretrain.distributed.device import Device, cpu_device, cuda_device, detect_device
from pretrain.errors import ConfigError, counted
from pretrain.memory.hardware import find_gpu
from pretrain.memory.plan_remarks import plan_remarks
from pretrain.model.attention_memory import expected_operator
from pretrain.model.recomputed_flops import more_flops
from pretrain.terminal import print_rows

_DEVICES = {"cpu": cpu_device, "cuda": cuda_device, "auto": detect_device}


def plan_lines(plan: Plan) -> list[str]:
    """Return the lines that describe a run."""
    layout = plan.layout
    degrees = [counted(layout.pipeline_stages, "pipeline stage"), f"{layout.data_parallel_size} data-parallel"]
    degrees += [f"{size} {kind}-parallel" for kind, size in (("sequence", layout.sequence_parallel_size),
                                                             ("tensor", layout.tensor_parallel_size)) if size > 1]
    ranks = f"ZeRO-{layout.zero_stage}, {' x '.join(degrees)} = {counted(layout.world_size, 'rank')}"
    experts = [f"{layout.expert_parallel_size} ranks share the experts"] if layout.expert_parallel_size > 1 else []
    offload = [f"{what} on {device}" for what, device in
               (("optimizer", layout.offload_optimizer), ("parameters", layout.offload_param)) if device != "none"]
    precision = layout.precision
    if layout.grad_accum_dtype:
        precision += f", gradients accumulated in {layout.grad_accum_dtype}"
    if layout.precision == "fp16" and plan.args.emulate_fp16:
        precision += " (emulated where the device has none)"
    precision = ", ".join([precision, *precisions(plan.args)])
    batch = f"{layout.global_batch_size} samples a step = {layout.micro_batch_size} micro-batch x " \
            f"{layout.gradient_accumulation_steps} accumulation x {layout.data_parallel_size} data-parallel"
    rows = {
        "layout": ", ".join([ranks, *experts, *offload]),
        "precision": precision,
        "attention": _attention(plan),
        "recompute": _recomputation(plan),
        "batch": batch,
        "ramp-up": batches_text(plan.length),
        "model": f"{plan.args.model or 'of the weights'}: {plan.model.architecture}, "
                 f"{plan.model.parameters_text()}, {counted(plan.model.num_layers, 'layer')}, "
                 f"vocabulary {plan.model.vocab_size:,}",
        "length": _length_text(plan),
        "rate": _scheduler_text(plan) if plan.schedule is None else schedule_text(plan.schedule),
        "rates": _json_rates_text(plan) if plan.schedule is None else rates_text(plan.schedule, plan.train_steps),
        "data": _data_text(plan),
    }
    return [f"{name:<11}{content}" for name, content in rows.items() if content] + _source_lines(plan)


def _scheduler_text(plan: Plan) -> str:
    """Describe the JSON's scheduler, with the values that "auto" has got."""
    params = plan.get("scheduler.params", {})
    return f"the JSON's {plan.get('scheduler.type')}: {', '.join(f'{name} {value}' for name, value in params.items())}"


def _json_rates_text(plan: Plan) -> str:
    """Return the rates of a few steps with the JSON's scheduler."""
    rate, last, params = rate_of(plan), plan.train_steps, plan.get("scheduler.params", {})
    steps = {1, last // 2, last, *(params[name] for name in ("warmup_num_steps", "total_num_steps") if name in params)}
    return ", ".join(f"step {step:,}: {rate(step - 1):.4g}" for step in sorted(steps) if 1 <= step <= last)


def _data_text(plan: Plan) -> str:
    if plan.data.module is not None:
        return ", ".join(f"{data.samples_per_epoch:,} {name} items" for name, data in plan.datasets.items())
    others = ", ".join(f"{name} {data.num_tokens:,}" for name, data in plan.datasets.items() if name != "train")
    return f"{plan.datasets['train'].num_tokens:,} training tokens; {others or 'no others'}"


def _attention(plan: Plan) -> str:
    """Describe the operators that attention will probably use on CUDA; "" on other devices."""
    model, args = plan.model, plan.args
    if plan.layout.device_kind != "cuda":
        return ""
    windows = dict.fromkeys(model.window(index) % args.seq_length for index in range(model.num_layers))
    return "; ".join(dict.fromkeys(expected_operator(
        precision=plan.layout.precision, head_size=model.head_size, seq_length=args.seq_length,
        dropout=model.attention_dropout, softcap=bool(model.attention_softcap), plain=args.plain_operators,
        special=bool(window or model.attention_softcap or model.position == "alibi" or args.document_attention))
        for window in windows))


def _length_text(plan: Plan) -> str:
    tokens = plan.length.tokens_after(plan.train_steps)
    product = "" if len(plan.length.batch_sizes.stages) > 1 else f" x {plan.layout.tokens_per_step:,} tokens"
    return f"{plan.train_steps:,} steps{product} = {tokens:,} tokens, {plan.epochs:.2f} epochs"


def _source_lines(plan: Plan) -> list[str]:
    """Return a line for each source of a blend: its part of the samples, and how often the run reads it."""
    train = plan.datasets["train"]
    if not isinstance(train, BlendedSamples):
        return []
    samples = plan.length.samples
    span = plan.args.first_sample, plan.args.first_sample + samples
    return [f"{'source':<11}{data.sources[0].prefix}: {count / samples:.1%} of the samples, {epochs:.2f} epochs of "
            f"{data.num_tokens:,} tokens"
            for data, count, epochs in zip(train.datasets, train.counts_between(*span), train.epochs(*span),
                                           strict=True)]


def _recomputation(plan: Plan) -> str:
    """Describe which activations the backward pass recomputes, where their inputs are kept, and the added FLOPs."""
    recompute, text = plan.layout.recomputation, "no activations"
    if recompute.is_on:
        text = {"blocks": "all activations", "attention": "activations of attention", "mlp": "activations of the MLP",
                "none": f"activations, in groups of {counted(recompute.interval, 'layer')}"}[recompute.part]
        text += f" in one of {recompute.every} blocks" if recompute.every > 1 else ""
        text += "; inputs in host memory" if recompute.offload else ""
    more = more_flops(plan.model, recompute, plan.layout.seq_length)
    return f"{text}; {more:.1%} more FLOPs" if more else text


def device_of(kind: str | None, gpu: str | None) -> Device:
    """Return the device that the flags name, with the memory of --gpu. Raises ConfigError."""
    if gpu is None:
        return _DEVICES[kind or "auto"]()
    if kind == "cpu":
        raise ConfigError("--gpu", problem="--device cpu was chosen as well", remedy="Leave one of them out")
    found = find_gpu(gpu)
    return replace(cuda_device(), memory_bytes=found.memory_bytes, fp16=True, bf16=found.knows_bf16)


def main(argv: list[str] | None = None) -> None:
    """Print the plan of a run. Raises ConfigError if `ds-pretrain train` would reject the run."""
    words = sys.argv[1:] if argv is None else argv
    own = Parser(add_help=False, usage="ds-pretrain check [flags] [flags of a run]")
    own.add_argument("--world_size", type=whole_number(1, 10**7), default=1, metavar="N",
                     help="number of ranks (default: %(default)s)")
    own.add_argument("--device", choices=sorted(_DEVICES), help="device of the run (default: the one of this machine)")
    own.add_argument("--gpu", type=text, help="GPU of the run: a name such as h100, or its memory in GiB")
    known, rest = parse_before_run(own, words)
    device = device_of(known.device, known.gpu)
    args = parse_arguments(rest)
    prefix = " ".join(args.train_data or [])
    if command := before_check(rest, prefix):
        raise ConfigError("--train_data", problem=f"{prefix} does not exist yet", remedy=f"first: {command}")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which some models need, would detect one and warn
    start = check_start(args, world_size=known.world_size, device=device)
    prepare_extensions(start.plan)
    resume, plan = start.resume, start.plan_to_run
    lines = plan_lines(plan)
    if start.weights is not None:
        lines.append(f"{'weights':<11}from {start.weights.origin.folder}")
    if resume is not None:
        kind = "branch" if resume.branch else "resume"
        lines.append(f"{kind:<11}from {resume.folder}")
    if proof := plan.model.implementation.prove(plan.model, plan.layout.precision):
        lines.append(f"{'proof':<11}{proof}")
    remarks = plan_remarks(plan, device, warnings=start.warnings)
    print_rows([*lines, *(f"{kind:<11}{remark}" for kind, remark in remarks)], indent=11)
    for line in next_line(after_check(rest, world_size=known.world_size, device=device.kind)):
        print(line)  # in one piece, to be copied

