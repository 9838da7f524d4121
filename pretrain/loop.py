"""The step loop, and what stands around it."""

import shutil
import time
from pathlib import Path
from socket import gethostname

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.check import Plan
from pretrain.checkpoint.resume import Resume
from pretrain.checkpoint.store import load_checkpoint, save_checkpoint
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
    sum_over_data_parallel,
    train_batch,
)
from pretrain.errors import ConfigError
from pretrain.metrics.meter import Meter
from pretrain.metrics.run_folder import RunFolder, run_record, versions


def train(plan: Plan, world: World, resume: Resume | None) -> int:
    """Run the plan to its end, from `resume` if given. Returns the exit code."""
    args = plan.args
    with deepspeed_output(args.deepspeed_log_level):
        init_process_group(world)
        engine = build_engine(plan)
        first_step, consumed_samples = _restore(engine, resume)
    folder = RunFolder(Path(args.save), active=world.rank == 0)
    meter = Meter(plan, engine, folder, rank=world.rank, first_step=first_step)
    loaders = {name: _loader(engine, plan, dataset) for name, dataset in plan.datasets.items()}
    _announce(plan, world, resume, meter, folder)
    meter.restart(first_step)

    last_step = min(plan.train_steps, args.exit_step or plan.train_steps)
    for step in range(first_step + 1, last_step + 1):
        micro_batches = meter.timed_data(loaders["train"].step, consumed_samples)
        lr = learning_rate(engine)
        loss = train_batch(engine, micro_batches)
        consumed_samples += plan.global_batch_size
        meter.log(step, loss, lr, consumed_samples)
        if _due(step, args.eval_interval, last_step) and "valid" in loaders:
            meter.log_eval(step, "valid", evaluate(engine, loaders["valid"], args.eval_steps), consumed_samples)
        if _due(step, args.save_interval, last_step):
            _save(engine, plan, folder, step, consumed_samples)
            meter.restart(step)

    if last_step == plan.train_steps and "test" in loaders:
        meter.log_eval(last_step, "test", evaluate(engine, loaders["test"], args.eval_steps), consumed_samples)
    folder.event("stop", step=last_step, reason="finished" if last_step == plan.train_steps else "--exit_step")
    for loader in loaders.values():
        loader.close()
    dist.barrier()
    if world.local_rank == 0:
        _remove_swap_files(plan)
    dist.destroy_process_group()
    return 0


def evaluate(engine: DeepSpeedEngine, loader: Loader, eval_steps: int) -> torch.Tensor:
    """Mean loss of the first `eval_steps` global batches of the loader's split; a scalar on the device."""
    losses = [eval_batch(engine, batch) for batch in evaluation_batches(loader, eval_steps)]
    return torch.stack(losses).mean()


def _remove_swap_files(plan: Plan) -> None:
    """What NVMe offload left on this host; the checkpoint holds all of it."""
    for block in ("offload_optimizer", "offload_param"):
        path = (plan.ds_config.get("zero_optimization", {}).get(block) or {}).get("nvme_path")
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)


def _due(step: int, interval: int, last_step: int) -> bool:
    return step == last_step or (interval > 0 and step % interval == 0)


def _restore(engine: DeepSpeedEngine, resume: Resume | None) -> tuple[int, int]:
    """(steps done, samples consumed), after loading what there is to load."""
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, resume.manifest.step if resume else 0)
    if len(set(steps)) > 1:  # a file system that is not shared, or not yet in step
        raise ConfigError("--save", found=f"checkpoints of different steps on different ranks: {sorted(set(steps))}",
                          expected="one folder that all hosts share")
    if resume is None:
        return 0, 0
    load_checkpoint(engine, resume.folder, resume.manifest)
    return resume.manifest.step, resume.manifest.consumed_samples


def _loader(engine: DeepSpeedEngine, plan: Plan, dataset: SampleDataset) -> Loader:
    return Loader(dataset, micro_batch_size=plan.micro_batch_size,
                  gradient_accumulation_steps=plan.gradient_accumulation_steps,
                  data_parallel_rank=data_parallel_rank(engine), data_parallel_size=data_parallel_size(engine),
                  eod_token=plan.eod_token if plan.args.eod_mask_loss else None,
                  sum_over_data_parallel=lambda value: sum_over_data_parallel(engine, value),
                  pin_memory=engine.device.type == "cuda")


def _save(engine: DeepSpeedEngine, plan: Plan, folder: RunFolder, step: int, consumed_samples: int) -> None:
    start = time.perf_counter()
    saved = save_checkpoint(engine, plan, folder.path / "checkpoints", step=step, consumed_samples=consumed_samples,
                            versions=versions())
    folder.event("save", step=step, path=str(saved), seconds=round(time.perf_counter() - start, 3))


def _announce(plan: Plan, world: World, resume: Resume | None, meter: Meter, folder: RunFolder) -> None:
    hosts = [""] * world.size
    dist.all_gather_object(hosts, gethostname())
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
