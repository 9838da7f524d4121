"""The step loop, and what stands around it."""

import functools
import sys
from pathlib import Path
from socket import gethostname

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.check import Plan
from pretrain.checkpoint.agree import agree_on_checkpoint
from pretrain.checkpoint.resume import Resume
from pretrain.checkpoint.saver import Saver
from pretrain.checkpoint.store import load_checkpoint
from pretrain.data.dataset import SampleDataset
from pretrain.data.loader import Loader, evaluation_batches
from pretrain.distributed import World, init_process_group
from pretrain.engine import (
    DeepSpeedEngine,
    build_engine,
    data_parallel_rank,
    data_parallel_size,
    deepspeed_output,
    eval_batch,
    learning_rate,
    remove_swap_files,
    sum_over_data_parallel,
    train_batch,
)
from pretrain.exit_codes import FINISHED, STOPPED
from pretrain.memory.advice import MemoryWatch
from pretrain.metrics.meter import Meter
from pretrain.metrics.run_folder import RunFolder, run_record
from pretrain.ranks import gather
from pretrain.resilience.stop import Stop


def train(plan: Plan, world: World, watch: MemoryWatch) -> int:
    """Run the plan to its end, from the newest whole checkpoint if there is one. Returns the exit code."""
    args = plan.args
    last_step = min(plan.train_steps, args.exit_step or plan.train_steps)
    with deepspeed_output(args.deepspeed_log_level):
        init_process_group(world)
        resume = agree_on_checkpoint(plan, functools.partial(print, file=sys.stderr, flush=True))
    if resume is not None and resume.manifest.step >= last_step:
        return _is_complete(plan, resume, last_step)
    with deepspeed_output(args.deepspeed_log_level):
        engine = build_engine(plan)
        first_step, consumed_samples = _restore(engine, plan, resume)
    folder = RunFolder(Path(args.save), active=world.rank == 0)
    meter = Meter(plan, engine, folder, rank=world.rank, first_step=first_step)
    saver = Saver(plan, folder)
    stop = Stop(engine.device)
    loaders = {name: _loader(engine, plan, dataset) for name, dataset in plan.datasets.items()}
    _announce(plan, world, resume, meter, folder)
    meter.restart(first_step)

    step, stopped_by = first_step, ""
    for step in range(first_step + 1, last_step + 1):
        eval_loss = None
        micro_batches = meter.timed_data(loaders["train"].step, consumed_samples)
        lr = learning_rate(engine)
        watch.before_step(step - first_step - 1, engine)
        loss = train_batch(engine, micro_batches)
        consumed_samples += plan.global_batch_size
        meter.log(step, loss, lr, consumed_samples)
        watch.after_step(step - first_step, meter.say)
        if _due(step, args.eval_interval, last_step) and "valid" in loaders:
            eval_loss = meter.log_eval(step, "valid", evaluate(engine, loaders["valid"], args.eval_steps),
                                       consumed_samples)
        stopped_by = stop.requested()
        if _due(step, args.save_interval, last_step) or stopped_by:
            saver.save(engine, step=step, consumed_samples=consumed_samples, eval_loss=eval_loss,
                       last=step == last_step or stopped_by != "")
            meter.restart(step)
        if stopped_by:
            break

    if step == plan.train_steps and "test" in loaders:
        meter.log_eval(step, "test", evaluate(engine, loaders["test"], args.eval_steps), consumed_samples)
    for loader in loaders.values():
        loader.close()
    saver.close(wait_for_copies=not stopped_by)
    stop.close()
    folder.event("stop", step=step, reason="finished" if step == plan.train_steps else stopped_by or "--exit_step")
    dist.barrier()
    if world.local_rank == 0:
        remove_swap_files(plan)
    dist.destroy_process_group()
    return STOPPED if step < last_step else FINISHED


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
    return Loader(dataset, micro_batch_size=plan.micro_batch_size,
                  gradient_accumulation_steps=plan.gradient_accumulation_steps,
                  data_parallel_rank=data_parallel_rank(engine), data_parallel_size=data_parallel_size(engine),
                  eod_token=plan.eod_token if plan.args.eod_mask_loss else None,
                  sum_over_data_parallel=lambda value: sum_over_data_parallel(engine, value),
                  pin_memory=engine.device.type == "cuda")


def _announce(plan: Plan, world: World, resume: Resume | None, meter: Meter, folder: RunFolder) -> None:
    hosts = gather(gethostname())
    if world.rank == 0:
        folder.start(run_record(plan, sorted(set(hosts))))
    folder.event("start", step=resume.manifest.step if resume else 0, world_size=world.size)
    meter.say(f"{plan.model.num_parameters() / 1e6:,.1f} M parameters; {_layout(plan)}; global batch "
              f"{plan.global_batch_size} x {plan.args.seq_length} tokens; {plan.train_steps} steps")
    for note in plan.notes:
        meter.say(f"note: {note}")
    for warning in resume.warnings if resume else []:
        meter.say(f"warning: {warning}")
        folder.event("verify", step=resume.manifest.step if resume else 0, reason=warning)
    if resume is not None:
        meter.say(f"resumed from {resume.folder}")
        folder.event("resume", step=resume.manifest.step, path=str(resume.folder))


def _layout(plan: Plan) -> str:
    parts = [get_accelerator().device_name(), plan.precision, f"ZeRO-{plan.zero_stage}",
             f"{plan.data_parallel_size} data-parallel"]
    if plan.pipeline_stages > 1:
        parts.append(f"{plan.pipeline_stages} pipeline stages")
    parts += [f"{what} on {place}" for what, place in
              (("optimizer", plan.offload_optimizer), ("parameters", plan.offload_param)) if place != "none"]
    return ", ".join(parts)
