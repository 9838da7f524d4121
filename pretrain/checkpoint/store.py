"""Save and load through the engine. A checkpoint is whole or absent: it is written under a temporary name, and renamed.

A folder `global_stepN` holds DeepSpeed's own files, one `rng_state_rank_RRRRR.pt` a rank, and `manifest.json`.
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from pretrain import upstream
from pretrain.check import Plan
from pretrain.checkpoint.manifest import LATEST, Manifest, manifest_of, write_manifest


def _rng_file(folder: Path) -> Path:
    return folder / f"rng_state_rank_{dist.get_rank():05d}.pt"


def _save_rng_state(folder: Path) -> None:
    device = get_accelerator()
    states = {"cpu": torch.get_rng_state()}
    if device.device_name() != "cpu":
        states["device"] = device.get_rng_state()
    torch.save(states, _rng_file(folder))


def _load_rng_state(folder: Path) -> None:
    states = torch.load(_rng_file(folder), weights_only=True)
    torch.set_rng_state(states["cpu"])
    if "device" in states:
        get_accelerator().set_rng_state(states["device"])


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _fsync(path: Path) -> None:
    """Flush a file or a folder to the disk, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(engine: DeepSpeedEngine, plan: Plan, folder: Path, *, step: int, consumed_samples: int,
                    versions: dict[str, str]) -> Path:
    """Write `folder/global_stepSTEP`, then `latest`; collective. A kill at any point leaves the ones before whole."""
    tag = f"global_step{step}"
    temporary, final = folder / f".tmp-{tag}", folder / tag
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # what a killed run left
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=temporary.name, save_latest=False,
                           client_state={"step": step, "consumed_samples": consumed_samples})
    _save_rng_state(temporary)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in temporary.rglob("*"):
            _fsync(path)
        write_manifest(temporary, manifest_of(plan, step=step, consumed_samples=consumed_samples, versions=versions))
        shutil.rmtree(final, ignore_errors=True)  # only a damaged one can be there: a whole one was resumed from
        temporary.rename(final)
        _fsync(folder)
        _write_atomically(folder / LATEST, tag)
    dist.barrier()
    return final


def load_checkpoint(engine: DeepSpeedEngine, folder: Path, manifest: Manifest) -> None:
    """Weights, optimizer, schedule, loss scale and this rank's RNG state from a checkpoint of the same layout."""
    upstream.load_checkpoint(engine, folder.parent, folder.name)
    assert engine.global_steps == manifest.step, (engine.global_steps, manifest.step)
    _load_rng_state(folder)
