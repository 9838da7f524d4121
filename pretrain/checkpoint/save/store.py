"""Save a checkpoint through the engine. It is written under a temporary name and then renamed, so it is never partial.

A folder `global_stepN` holds DeepSpeed's own files; for each rank `rng_state_rank_RRRRR.pt` and
`shard_index_rank_RRRRR.json`, which says where each weight and optimizer state lies; and `manifest.json`.
"""

import contextlib
import secrets
from pathlib import Path

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.files import FileRecord, HashedFile
from pretrain.checkpoint.format.manifest import Manifest, manifest_of
from pretrain.checkpoint.format.rng_state import rng_file, rng_state
from pretrain.checkpoint.format.shard_index import index_json, index_name
from pretrain.checkpoint.save.commit import check_space, commit, discard, temporary_folder, write_part
from pretrain.checkpoint.save.file_engine import FileEngine, OpenFile, save
from pretrain.checkpoint.save.space import next_checkpoint_bytes
from pretrain.config.validate import Plan
from pretrain.distributed.collectives import from_rank_0, gather
from pretrain.engine.steps import loss_scale_state
from pretrain.errors import SaveError

_VISIBLE_S = 60  # for files of other hosts to be seen here, when all have been written


def begin_save(plan: Plan, checkpoints: Path, step: int) -> tuple[Path, str]:
    """(temporary folder, save_id) of a save that may begin; collective. Raises SaveError where the disk is too full."""

    def begin() -> tuple[Path, str]:
        temporary = temporary_folder(checkpoints, step)
        try:
            discard(temporary)  # what a killed run left
            checkpoints.mkdir(parents=True, exist_ok=True)
            check_space(checkpoints, needed_bytes=next_checkpoint_bytes(plan, checkpoints))
            temporary.mkdir()
        except OSError as error:
            raise SaveError(f"{temporary}: {error}") from error
        return temporary, secrets.token_hex(8)

    return from_rank_0(begin)


def write_files(engine: DeepSpeedEngine, temporary: Path, open_file: OpenFile, *, step: int,
                consumed_samples: int) -> str | None:
    """Let the engine write this rank's files through `open_file`; collective. Returns what went wrong on this rank."""
    files = FileEngine(open_file)
    engine.checkpoint_engine = files
    copy_recovery_script = type(engine)._copy_recovery_script
    engine._copy_recovery_script = lambda _: None  # on a full disk it raises, on rank 0 alone: the others would wait
    engine.save_checkpoint(str(temporary.parent), tag=temporary.name, save_latest=False,
                           client_state={"step": step, "consumed_samples": consumed_samples})
    rank = dist.get_rank()
    if rank == 0:
        with contextlib.suppress(OSError):
            copy_recovery_script(engine, str(temporary.parent))
    files.write(rng_file(temporary, rank), lambda file: save(rng_state(), file))
    index = index_json(engine).encode()
    files.write(temporary / index_name(rank), lambda file: file.write(index))
    return files.error


def save_checkpoint(engine: DeepSpeedEngine, plan: Plan, checkpoints: Path, *, step: int, consumed_samples: int,
                    versions: dict[str, str], eval_loss: float | None = None) -> tuple[Path, str, dict[str, int]]:
    """Write `checkpoints/global_stepSTEP`, then `latest`; collective. A kill at any point leaves the ones before whole.

    Returns:
        The folder, its save_id, and the bytes of each of its files.

    Raises SaveError, on every rank, where any could not write its files; nothing is left of the attempt then.
    """
    temporary, save_id = begin_save(plan, checkpoints, step)
    written: dict[str, FileRecord] = {}
    error = write_files(engine, temporary, lambda path: _Recorded(path, written), step=step,
                        consumed_samples=consumed_samples)
    try:
        if error is None:
            write_part(temporary, rank=dist.get_rank(), save_id=save_id, files=written)
    except OSError as failure:
        error = str(failure)
    errors = gather(error)
    manifest = describe(engine, plan, step=step, consumed_samples=consumed_samples, versions=versions,
                        eval_loss=eval_loss, save_id=save_id)

    def finish() -> dict[str, int]:
        if any(errors):
            discard(temporary)
            raise SaveError("; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error))
        committed = commit(temporary, manifest, timeout_s=_VISIBLE_S)
        return {name: record.bytes for name, record in committed.files.items()}

    sizes = from_rank_0(finish)
    return checkpoints / f"global_step{step}", save_id, sizes


class _Recorded(HashedFile):
    """A hashed file that enters its record into `written` when it is closed."""

    def __init__(self, path: Path, written: dict[str, FileRecord]) -> None:
        super().__init__(path)
        self._written = written

    def close(self) -> FileRecord:
        self._written[self.path.name] = record = super().close()
        return record


def describe(engine: DeepSpeedEngine, plan: Plan, *, step: int, consumed_samples: int, versions: dict[str, str],
             eval_loss: float | None, save_id: str) -> Manifest:
    """The manifest of the engine's present state, without files."""
    return manifest_of(plan, step=step, consumed_samples=consumed_samples, versions=versions, eval_loss=eval_loss,
                       loss_scale=loss_scale_state(engine), save_id=save_id)
