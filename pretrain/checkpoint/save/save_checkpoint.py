"""Save a checkpoint with DeepSpeed's engine, atomically: write a folder under a temporary name, then rename it.

A folder `global_stepN` holds DeepSpeed's own files, `manifest.json`, and for each rank `rng_state_rank_RRRRR.pt` and
`shard_index_rank_RRRRR.json`, which locates each weight and optimizer state.
"""

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.fragments import flat_tensors
from pretrain.checkpoint.format.hashed_files import FileGroup
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.pickles import rng_file, rng_state
from pretrain.checkpoint.format.run_manifest import manifest_of
from pretrain.checkpoint.format.shard_index import index_json, index_name
from pretrain.checkpoint.save.commit import (
    check_space,
    commit,
    discard,
    next_checkpoint_bytes,
    temporary_folder,
    write_part,
)
from pretrain.checkpoint.save.file_engine import FileEngine, FiniteCheck, OpenFile, save_pickle
from pretrain.config.validate import Plan
from pretrain.distributed.collectives import from_rank_0, gather
from pretrain.engine.recipe import recipe_states
from pretrain.engine.steps import loss_scale_state
from pretrain.errors import SaveError

_VISIBLE_S = 60  # time in which files of other hosts must become visible on this host after they were written


def begin_save(plan: Plan, checkpoints: Path, step: int) -> tuple[Path, str]:
    """Create the temporary folder and return it with a save_id; collective. Raises SaveError if disk space is short."""

    def begin() -> tuple[Path, str]:
        temporary = temporary_folder(checkpoints, step)
        try:
            discard(temporary)  # left by a run that was killed
            checkpoints.mkdir(parents=True, exist_ok=True)
            check_space(checkpoints, needed_bytes=next_checkpoint_bytes(plan, checkpoints))
            temporary.mkdir()
        except OSError as error:
            raise SaveError(f"{temporary}: {error}") from error
        return temporary, secrets.token_hex(8)

    return from_rank_0(begin)


def write_files(engine: DeepSpeedEngine, temporary: Path, open_file: OpenFile, *, step: int,
                consumed_samples: int) -> tuple[str | None, bool]:
    """Write this rank's files through `open_file`; collective.

    Returns the error of this rank, or None, and whether all tensors in its files are finite.
    """
    finite = FiniteCheck(flat_tensors(engine))
    files = FileEngine(open_file, finite)
    engine.checkpoint_engine = files
    copy_recovery_script = type(engine)._copy_recovery_script
    # on a full disk this method of DeepSpeed raises on rank 0 only, while the other ranks wait in a barrier
    engine._copy_recovery_script = lambda _: None
    engine.save_checkpoint(str(temporary.parent), tag=temporary.name, save_latest=False,
                           client_state={"step": step, "consumed_samples": consumed_samples})
    rank = dist.get_rank()
    if rank == 0:
        with contextlib.suppress(OSError):
            copy_recovery_script(engine, str(temporary.parent))
    files.write(rng_file(temporary, rank), lambda file: save_pickle(rng_state(), file))
    index = index_json(engine).encode()
    files.write(temporary / index_name(rank), lambda file: file.write(index))
    return files.error, finite.is_finite()


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    folder: Path
    save_id: str
    sizes: dict[str, int]  # bytes of each file
    finite: bool


def save_checkpoint(engine: DeepSpeedEngine, plan: Plan, checkpoints: Path, *, step: int, consumed_samples: int,
                    versions: dict[str, str], eval_loss: float | None = None) -> SavedCheckpoint:
    """Write `checkpoints/global_stepSTEP`, then update `latest`; collective. Earlier checkpoints are not changed.

    If any rank cannot write its files, the temporary folder is removed and SaveError is raised on every rank.
    """
    temporary, save_id = begin_save(plan, checkpoints, step)
    with FileGroup() as group:
        error, finite = write_files(engine, temporary, group.open_file, step=step, consumed_samples=consumed_samples)
        try:
            if error is None:
                write_part(temporary, rank=dist.get_rank(), save_id=save_id, files=group.finish(), finite=finite)
        except OSError as failure:
            error = str(failure)
    errors = gather(error)
    manifest = manifest_of_engine(engine, plan, step=step, consumed_samples=consumed_samples, versions=versions,
                                  eval_loss=eval_loss, save_id=save_id)

    def finish() -> SavedCheckpoint:
        if any(errors):
            discard(temporary)
            raise SaveError("; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error))
        committed = commit(temporary, manifest, timeout_s=_VISIBLE_S)
        sizes = {name: record.bytes for name, record in committed.files.items()}
        return SavedCheckpoint(checkpoints / f"global_step{step}", save_id, sizes, committed.is_good)

    return from_rank_0(finish)


def manifest_of_engine(engine: DeepSpeedEngine, plan: Plan, *, step: int, consumed_samples: int,
                       versions: dict[str, str], eval_loss: float | None, save_id: str) -> Manifest:
    """Return the manifest of the engine's current state, with empty `files`."""
    return manifest_of(plan, step=step, consumed_samples=consumed_samples, versions=versions, eval_loss=eval_loss,
                       loss_scale=loss_scale_state(engine), recipe_states=recipe_states(engine), save_id=save_id)
