"""Reports of a run's start, its batch size and its end, in run.json, in events.jsonl and on the terminal."""

import os
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from pretrain.active_extensions import advice_on, extensions, precisions, records_of_extensions
from pretrain.callback import Callback, Run
from pretrain.cli import next_line
from pretrain.config.flags.arguments import FLAGS
from pretrain.config.plan import Plan
from pretrain.data.data_spec import absolute_words
from pretrain.data.tokenizers.tokenizer import absolute_tokenizer
from pretrain.distributed.collectives import gather
from pretrain.distributed.world import World
from pretrain.engine.layer_times import layer_times_record
from pretrain.errors import GUARD, GuardError, counted, format_number
from pretrain.model.config import ModelConfig
from pretrain.model.partition import layer_costs, stage_bounds
from pretrain.monitor.environment import (
    code_record,
    command,
    environment_variables,
    host_record,
    software,
    versions,
)
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.paths import STOP_FILE
from pretrain.remote import without_credentials as plain
from pretrain.terminal import Screen

EARLY_STOP = "early_stop"  # the event, and the reason of the event "stop"
_LAYOUT = ("world_size", "data_parallel_size", "pipeline_stages", "tensor_parallel_size", "sequence_parallel_size",
           "expert_parallel_size", "zero_stage", "precision")
_BATCH = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
_DATA_FLAGS = ("train_data", "valid_data", "test_data")


def announce_start(plan: Plan, world: World, screen: Screen, folder: RunFolder, *, first_step: int,
                   resumed_from: Path | None, is_branch: bool, warnings: Sequence[str],
                   operators: Mapping[str, str]) -> None:
    """Describe the run, its notes, and the checkpoint or weights that it starts from. Collective.

    Args:
        is_branch: the checkpoint `resumed_from` belongs to another run.
        operators: names of the operators that were chosen for this device, such as {"attention": "flash"}.
    """
    hosts = gather(host_record())
    if world.rank == 0:
        record = run_record(plan, hosts, first_step=first_step, resumed_from=resumed_from)
        folder.start({**record, "operators": dict(operators)})
    folder.event("start", step=first_step, world_size=world.size, **operators)
    stages = plan.length.batch_sizes.stages
    batch = f"{stages[0][1]} to {stages[-1][1]}" if len(stages) > 1 else f"{stages[0][1]}"
    screen.line(f"{_parameters_text(plan.model)}; {_layout_text(plan)}; global batch "
                f"{batch} x {plan.args.seq_length} tokens; {counted(plan.train_steps, 'step')}")
    if operators:
        screen.line("; ".join(f"{name}: {choice}" for name, choice in operators.items()))
    if plan.layout.layer_times:
        screen.line(_stages_text(plan))
    for note in plan.notes:
        screen.line(f"note: {note}")
    for warning in warnings:
        screen.line(f"warning: {warning}")
        folder.event("verify", step=first_step, reason=warning)
    if resumed_from is None:
        if plan.origin is not None:
            screen.line(f"starts from the weights in {plan.origin.folder}")
            folder.event("init", step=0, **asdict(plan.origin))
        return
    for change in plan.overrides:
        if change["step"] == first_step:
            folder.event("override", **change)
    if is_branch:
        screen.line(f"branched from {resumed_from}")
        folder.event("branch", **plan.lineage[-1])
    else:
        screen.line(f"resumed from {resumed_from}")
        folder.event("resume", step=first_step, path=str(resumed_from))


def run_record(plan: Plan, hosts: Sequence[dict[str, Any]], *, first_step: int,
               resumed_from: Path | None) -> dict[str, Any]:
    """Return the record of one start: everything that the result of the run depends on.

    Args:
        hosts: `host_record` of each rank's host, in rank order.
        first_step: number of steps that were done before this start.
        resumed_from: checkpoint that the start continues from.
    """
    layout, code = plan.layout, code_record(Path(plan.args.save))
    ranks = Counter(host["host"] for host in hosts)
    different_hosts = {host["host"]: host for host in hosts}.values()
    return {
        "time": time.time(), "first_step": first_step,
        "command": command(), "environment": environment_variables(os.environ),
        "flags": _flags(plan),
        "extensions": {each.name: each.origin for each in extensions() if each.is_used(plan.args)},
        "deepspeed_config": plan.ds_config, "given_deepspeed_config": plan.file.values,
        "schedule": asdict(plan.schedule) if plan.schedule else None,
        "origin": asdict(plan.origin) if plan.origin else None,
        "resumed_from": None if resumed_from is None else str(resumed_from.absolute()),
        "lineage": list(plan.lineage), "overrides": list(plan.overrides),
        "model_config": plan.model.hf_config, "num_parameters": plan.model.num_parameters(),
        **({"active_parameters": plan.model.num_parameters(active=True)} if plan.model.has_active_parameters else {}),
        "train_steps": plan.train_steps, "seed": plan.args.seed,
        "layout": {name: getattr(layout, name) for name in _LAYOUT},
        "batch": {name: getattr(layout, name) for name in _BATCH},
        "data": {name: dataset.fingerprint for name, dataset in plan.datasets.items()},
        "samples_per_epoch": plan.datasets["train"].samples_per_epoch if "train" in plan.datasets else None,
        **records_of_extensions(plan),
        "unigram_entropy": plan.unigram_entropy,
        "tokenizer": plan.tokenizer.fingerprint if plan.tokenizer else None,
        "layer_times": layer_times_record(plan),
        "versions": versions(), "software": software(), "git_commit": code["commit"], "code": code,
        "hosts": sorted(ranks),
        "hardware": [{**host, "ranks": ranks[host["host"]]} for host in different_hosts],
    }


def _flags(plan: Plan) -> dict[str, Any]:
    """Return all flags, with absolute paths of data and tokenizer: tools read these files in any working directory.

    Those that say who hears of the run are left out: a command may hold secrets, and repetitions must not send.
    """
    args = plan.args
    flags = {**args.values(), "tokenizer": args.tokenizer and absolute_tokenizer(args.tokenizer),
             **{name: absolute_words(getattr(args, name)) for name in _DATA_FLAGS}}
    return {name: plain(value) if isinstance(value, str) else value for name, value in flags.items()
            if not (FLAGS[name].group.not_recorded or FLAGS[name].is_secret)}


def _parameters_text(model: ModelConfig) -> str:
    active = f" ({model.num_parameters(active=True) / 1e6:,.1f} M active)" if model.has_active_parameters else ""
    return f"{model.num_parameters() / 1e6:,.1f} M parameters{active}"


def _layout_text(plan: Plan) -> str:
    """Describe a layout, such as `cuda, bf16, ZeRO-2, 8 data-parallel, 2 tensor-parallel, optimizer on cpu`."""
    layout = plan.layout
    parts = [get_accelerator().device_name(), layout.precision, *precisions(plan.args), f"ZeRO-{layout.zero_stage}",
             f"{layout.data_parallel_size} data-parallel"]
    if layout.pipeline_stages > 1:
        parts.append(f"{layout.pipeline_stages} pipeline stages")
    parts += [f"{size} {kind}-parallel" for kind, size in
              (("tensor", layout.tensor_parallel_size), ("sequence", layout.sequence_parallel_size),
               ("expert", layout.expert_parallel_size)) if size > 1]
    parts += [f"{what} on {device}" for what, device in
              (("optimizer", layout.offload_optimizer), ("parameters", layout.offload_param)) if device != "none"]
    return ", ".join(parts)


def _stages_text(plan: Plan) -> str:
    """Describe the pipeline stages of the partition method "time"."""
    times = plan.layout.layer_times
    bounds = stage_bounds(layer_costs(plan.model, plan.args.seq_length), num_stages=plan.layout.pipeline_stages,
                          method=plan.layout.partition_method, times=times)
    stages = [f"layers {start} to {end - 1} {format_number(sum(times[start:end]) / 1e6)} ms"
              for start, end in pairwise(bounds)]
    return f"pipeline stages by the measured time of a micro-batch: {', '.join(stages)}"


def stopped_by_guard(folder: RunFolder, step: int, line: str) -> GuardError:
    """Write the event "stop" with exit code 76, and return the error with which all ranks end the run."""
    folder.event("stop", step=step, reason=line, exit_code=GUARD)
    return GuardError(line)


def announce_end(plan: Plan, step: int, stopped_by: str, losses: dict[str, float], screen: Screen,
                 folder: RunFolder, *, is_done: bool, is_saved: bool) -> None:
    """Report why the run ends after `step`. `stopped_by`: the name of a signal, another reason, or "".

    Args:
        is_done: nothing is left to do, although steps are left.
        is_saved: there is a checkpoint of the step.
    """
    is_finished = step == plan.train_steps and is_saved
    folder.event("stop", step=step, reason="finished" if is_finished else stopped_by or "--exit_step",
                 is_done=is_done or is_finished)
    if is_finished:
        last = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        screen.line(f"finished {counted(step, 'step')} in {plan.args.save}: {last}")
        for command in advice_on("finished"):
            for line in next_line(command.format(run=shlex.quote(plan.args.save))):
                screen.line(line)
        for command in commands_for_the_model(plan):
            for line in next_line(command, "also"):
                screen.line(line)
    elif not is_saved:
        screen.line(f"ended by {stopped_by} after step {step}")
    elif is_done:
        ended = "" if stopped_by == EARLY_STOP else f"ended by {stopped_by}: "
        screen.line(f"{ended}saved global_step{step} in {plan.args.save}")
    elif stopped_by:
        stop_file = folder.path / STOP_FILE
        remedy = f"after `rm {stop_file}`, " if stop_file.exists() else ""
        screen.line(f"stopped by {stopped_by}: saved global_step{step}; {remedy}the same command continues")
    else:
        screen.line(f"stopped by --exit_step: saved global_step{step} of {counted(plan.train_steps, 'step')} in "
                    f"{plan.args.save}")


def commands_for_the_model(plan: Plan) -> list[str]:
    """Return commands for the model of a run that has finished. A word in capitals is for the user to replace."""
    run = shlex.quote(plan.args.save)
    advised = [command.format(run=run) for command in advice_on("trained") if plan.args.tokenizer]
    evaluated = next((name for name in ("test", "valid") if name in plan.datasets), "")
    return [*advised, *([f"ds-pretrain evaluate {run} --split {evaluated}"] if evaluated else []),
            f"ds-pretrain export {run} --output FOLDER"]


class BatchRamp(Callback):
    """Reports each change of the global batch size once, also if a resume lies just before it."""

    order = 5

    def __init__(self) -> None:
        self._last: int | None = None  # batch size of the last step

    def begin_step(self, run: Run) -> None:
        sizes, position = run.plan.length.batch_sizes, run.consumed_samples
        before = sizes.ending_at(position) if self._last is None else self._last
        size = self._last = sizes.at(position)
        if size != before and run.step > 1:
            run.event("batch", global_batch_size=size, before=before, consumed_samples=position)
            run.screen.line(f"step {run.step}: the global batch grows from {before} to {size} samples")
