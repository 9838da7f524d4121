"""The step loop, and what stands around it."""

import functools
import sys
from pathlib import Path
from socket import gethostname

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.checkpoint.load.agree import agree_on_checkpoint
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.load.resume import Resume
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.layout import Layout
from pretrain.config.validate import Plan
from pretrain.console.screen import Screen
from pretrain.console.status import clear_status, status
from pretrain.data.dataset import SampleDataset
from pretrain.data.loader import Loader, evaluation_batches
from pretrain.distributed.collectives import gather
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World
from pretrain.engine.build import DeepSpeedEngine, build_engine, deepspeed_output, remove_swap_files
from pretrain.engine.steps import (
    data_parallel_rank,
    data_parallel_size,
    eval_batch,
    learning_rate,
    sum_over_data_parallel,
    train_batch,
)
from pretrain.errors import FINISHED, STOPPED
from pretrain.memory.report.memory_watch import MemoryWatch
from pretrain.monitor.meter import Meter
from pretrain.monitor.run_folder import RunFolder, run_record
from pretrain.resilience.stop import Stop


def train(plan: Plan, world: World, watch: MemoryWatch) -> int:
    """Run the plan to its end, from the newest whole checkpoint if there is one. Returns the exit code."""
    last_step = min(plan.train_steps, plan.args.exit_step or plan.train_steps)
    with deepspeed_output(plan.args.deepspeed_log_level):
        status(f"connecting {world.size} rank{'s' * (world.size > 1)}")
        init_process_group(world)
        resume = agree_on_checkpoint(plan, functools.partial(print, file=sys.stderr, flush=True))
    clear_status()
    if resume is not None and resume.manifest.step >= last_step:
        return _is_complete(plan, resume, last_step)
    with deepspeed_output(plan.args.deepspeed_log_level):
        status("building the engine" + (f", loading {resume.folder.name}" if resume else ""))
        engine = build_engine(plan)
        first_step, consumed_samples = _restore(engine, plan, resume)
    clear_status()
    with Screen(active=world.rank == 0) as screen:
        folder = RunFolder(Path(plan.args.save), active=world.rank == 0)
        meter = Meter(plan, engine, folder, screen, rank=world.rank, first_step=first_step)
        saver = Saver(plan, folder, screen)
        stop = Stop(engine.device, report=screen.line)
        loaders = {name: _loader(engine, plan, dataset) for name, dataset in plan.datasets.items()}
        _announce(plan, world, resume, screen, folder)
        step, stopped_by = _run_steps(plan, engine, loaders, meter, saver, stop, watch, first_step=first_step,
                                      last_step=last_step, consumed_samples=consumed_samples)
        for loader in loaders.values():
            loader.close()
        saver.close(wait_for_copies=not stopped_by)
        stop.close()
        folder.event("stop", step=step, reason="finished" if step == plan.train_steps else stopped_by or "--exit_step")
        screen.line(_ending(plan, step, stopped_by, meter.losses))
    dist.barrier()
    if world.local_rank == 0:
        remove_swap_files(plan)
    dist.destroy_process_group()
    return STOPPED if step < last_step else FINISHED


def _run_steps(plan: Plan, engine: DeepSpeedEngine, loaders: dict[str, Loader], meter: Meter, saver: Saver, stop: Stop,
               watch: MemoryWatch, *, first_step: int, last_step: int, consumed_samples: int) -> tuple[int, str]:
    """The step loop, with the evaluation on test data at the run's end. Returns (last step, signal that stopped it)."""
    args = plan.args
    step, stopped_by = first_step, ""
    meter.restart(first_step)
    for step in range(first_step + 1, last_step + 1):
        eval_loss = None
        micro_batches = meter.timed_data(loaders["train"].step, consumed_samples)
        lr = learning_rate(engine)
        watch.before_step(step - first_step - 1, engine)
        loss = train_batch(engine, micro_batches)
        consumed_samples += plan.layout.global_batch_size
        meter.log(step, loss, lr, consumed_samples)
        watch.after_step(step - first_step, meter.screen.line)
        if _due(step, args.eval_interval, last_step) and "valid" in loaders:
            eval_loss = _evaluate_split(engine, loaders, meter, "valid", args.eval_steps, step, consumed_samples)
        saver.poll()
        stopped_by = stop.requested()
        if _due(step, args.save_interval, last_step) or stopped_by:
            saver.save(engine, step=step, consumed_samples=consumed_samples, eval_loss=eval_loss,
                       last=step == last_step or stopped_by != "")
            meter.restart(step)
        if stopped_by:
            break
    if step == plan.train_steps and "test" in loaders:
        _evaluate_split(engine, loaders, meter, "test", args.eval_steps, step, consumed_samples)
    return step, stopped_by


def _evaluate_split(engine: DeepSpeedEngine, loaders: dict[str, Loader], meter: Meter, name: str, eval_steps: int,
                    step: int, consumed_samples: int) -> float:
    """Evaluate on the split `name` and report it. Returns the loss."""
    meter.screen.status(f"step {step}/{meter.plan.train_steps}  evaluating on {name} data")
    return meter.log_eval(step, name, evaluate(engine, loaders[name], eval_steps), consumed_samples)


def evaluate(engine: DeepSpeedEngine, loader: Loader, eval_steps: int) -> torch.Tensor:
    """Mean loss of the first `eval_steps` global batches of the loader's split; a scalar on the device."""
    losses = [eval_batch(engine, batch) for batch in evaluation_batches(loader, eval_steps)]
    return torch.stack(losses).mean()


def _due(step: int, interval: int, last_step: int) -> bool:
    return step == last_step or (interval > 0 and step % interval == 0)


def _is_complete(plan: Plan, resume: Resume, last_step: int) -> int:
    if dist.get_rank() == 0:
        print(f"{plan.args.save} is complete: {resume.manifest.step} of {last_step} steps are done")
    dist.destroy_process_group()
    return FINISHED


def _restore(engine: DeepSpeedEngine, plan: Plan, resume: Resume | None) -> tuple[int, int]:
    """(steps done, samples consumed), after loading what there is to load."""
    if resume is None:
        return 0, 0
    load_checkpoint(engine, plan, resume.folder, resume.manifest)
    return resume.manifest.step, resume.manifest.consumed_samples


def _loader(engine: DeepSpeedEngine, plan: Plan, dataset: SampleDataset) -> Loader:
    return Loader(dataset, micro_batch_size=plan.layout.micro_batch_size,
                  gradient_accumulation_steps=plan.layout.gradient_accumulation_steps,
                  data_parallel_rank=data_parallel_rank(engine), data_parallel_size=data_parallel_size(engine),
                  eod_token=plan.eod_token if plan.args.eod_mask_loss else None,
                  sum_over_data_parallel=lambda value: sum_over_data_parallel(engine, value),
                  pin_memory=engine.device.type == "cuda")


def _announce(plan: Plan, world: World, resume: Resume | None, screen: Screen, folder: RunFolder) -> None:
    hosts = gather(gethostname())
    if world.rank == 0:
        folder.start(run_record(plan, sorted(set(hosts))))
    folder.event("start", step=resume.manifest.step if resume else 0, world_size=world.size)
    screen.line(f"{plan.model.num_parameters() / 1e6:,.1f} M parameters; {_layout(plan.layout)}; global batch "
                f"{plan.layout.global_batch_size} x {plan.args.seq_length} tokens; {plan.train_steps} steps")
    for note in plan.notes:
        screen.line(f"note: {note}")
    for warning in resume.warnings if resume else []:
        screen.line(f"warning: {warning}")
        folder.event("verify", step=resume.manifest.step if resume else 0, reason=warning)
    if resume is not None:
        screen.line(f"resumed from {resume.folder}")
        folder.event("resume", step=resume.manifest.step, path=str(resume.folder))


def _layout(layout: Layout) -> str:
    parts = [get_accelerator().device_name(), layout.precision, f"ZeRO-{layout.zero_stage}",
             f"{layout.data_parallel_size} data-parallel"]
    if layout.pipeline_stages > 1:
        parts.append(f"{layout.pipeline_stages} pipeline stages")
    parts += [f"{what} on {device}" for what, device in
              (("optimizer", layout.offload_optimizer), ("parameters", layout.offload_param)) if device != "none"]
    return ", ".join(parts)


def _ending(plan: Plan, step: int, stopped_by: str, losses: dict[str, float]) -> str:
    """The run's last line: how far it came, and where it is or how to continue it."""
    if stopped_by and step < plan.train_steps:
        return f"stopped by {stopped_by}: saved global_step{step}; the same command continues"
    if step < plan.train_steps:
        return f"stopped by --exit_step: saved global_step{step} of {plan.train_steps} steps in {plan.args.save}"
    last = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    return f"finished {step} steps in {plan.args.save}: {last}"
