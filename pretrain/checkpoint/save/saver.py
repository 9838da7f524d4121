"""When and how the loop's checkpoints are written: at once or in the background, and what comes after each."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.verify import files_of_rank
from pretrain.checkpoint.save.background import BackgroundWriter
from pretrain.checkpoint.save.store import begin_save, describe, save_checkpoint, write_files
from pretrain.checkpoint.save.writer import AfterSave, SaveJob, SnapshotFiles
from pretrain.checkpoint.save.writer_locks import has_ended
from pretrain.config.validate import Plan
from pretrain.console.screen import Screen
from pretrain.distributed.collectives import from_rank_0, gather, wait_until_all
from pretrain.errors import SaveError
from pretrain.monitor.run_folder import RunFolder, versions


class Saver:
    """Saves as the flags ask. A save that fails is told, and training goes on; only the last one may not fail.

    All methods but `poll` are collective.
    """

    def __init__(self, plan: Plan, folder: RunFolder, screen: Screen) -> None:
        args = plan.args
        self._plan, self._folder, self._screen = plan, folder, screen
        self._checkpoints = folder.path.absolute() / "checkpoints"
        self._after = AfterSave(keep_checkpoints=args.keep_checkpoints, keep_every=args.keep_every,
                            keep_best=args.keep_best, mirror=args.checkpoint_mirror)
        in_background = args.async_save or args.checkpoint_mirror or (args.keep_checkpoints and dist.get_rank() == 0)
        self._writer = BackgroundWriter(self._checkpoints, dist.get_rank()) if in_background else None
        self._failure = ""  # of the newest save
        self._unheard: list[dict[str, Any]] = []  # complaints of this rank's writer that rank 0 is to print
        dist.barrier()  # all writers run and hold their locks: who sees rank 0's as free sees no other host's
        self._locks_are_shared = not any(gather(self._writer is not None and has_ended(self._checkpoints, 0)))

    def save(self, engine: DeepSpeedEngine, *, step: int, consumed_samples: int, eval_loss: float | None,
             last: bool) -> None:
        """Save, or begin to. Training waits for the copy in host memory, or for the disk."""
        start = time.perf_counter()
        self._screen.status(f"step {step}  saving a checkpoint")
        self._hear_all()
        cursor: dict[str, Any] = {"step": step, "consumed_samples": consumed_samples, "versions": versions(),
                                  "eval_loss": eval_loss}
        try:
            if not self._plan.args.async_save:
                self._write(engine, cursor, start)
            elif self._memory_is_free(step, wait=last or self._plan.args.save_busy == "wait"):
                self._begin(engine, cursor)
                dist.barrier()  # from here on a kill of all training processes loses nothing
                self._folder.event("snapshot", step=step, seconds=round(time.perf_counter() - start, 3))
        except SaveError as error:
            self._tell({"event": "save_failed", "step": step, "reason": str(error)})

    def _write(self, engine: DeepSpeedEngine, cursor: dict[str, Any], start: float) -> None:
        saved, save_id, sizes = save_checkpoint(engine, self._plan, self._checkpoints, **cursor)
        self._tell({"event": "save", "step": cursor["step"], "path": str(saved), "bytes": sum(sizes.values()),
                    "seconds": round(time.perf_counter() - start, 3)})
        if self._writer is not None:
            self._writer.start_again()
            names = files_of_rank(sizes, dist.get_rank(), dist.get_world_size())
            self._writer.submit(self._job(cursor["step"], save_id, names, snapshot=None))

    def _begin(self, engine: DeepSpeedEngine, cursor: dict[str, Any]) -> None:
        """Copy this rank's files into host memory, and let the writer do the rest."""
        assert self._writer is not None
        self._writer.start_again()
        temporary, save_id = begin_save(self._plan, self._checkpoints, cursor["step"])
        memory = self._writer.snapshot
        memory.clear()
        error = write_files(engine, temporary, lambda path: memory.open_file(path.name), step=cursor["step"],
                            consumed_samples=cursor["consumed_samples"])
        manifest = describe(engine, self._plan, save_id=save_id, **cursor).to_json() if dist.get_rank() == 0 else None
        names = [region.name for region in memory.files]
        self._writer.submit(self._job(cursor["step"], save_id, names,
                                      snapshot=SnapshotFiles(str(temporary), list(memory.files), error, manifest)))

    def _job(self, step: int, save_id: str, names: list[str], snapshot: SnapshotFiles | None) -> SaveJob:
        return SaveJob(step=step, final=str(self._checkpoints / f"global_step{step}"), rank=dist.get_rank(),
                   save_id=save_id, timeout_s=self._plan.args.save_timeout,
                   locks_are_shared=self._locks_are_shared, names=names, after=self._after,
                   snapshot=snapshot)

    def _memory_is_free(self, step: int, *, wait: bool) -> bool:
        """Whether the snapshot's memory can be used again, the same on every rank."""
        if wait:
            wait_until_all(lambda: not self._is_saving())
        elif any(gather(self._is_saving())):
            self._tell({"event": "save_skipped", "step": step, "reason": "the save before is still being written"})
            return False
        return True

    def _is_saving(self) -> bool:
        self.poll()
        return self._writer is not None and self._writer.saving

    def _is_idle(self) -> bool:
        self.poll()
        return self._writer is None or self._writer.idle

    def poll(self) -> None:
        """Report what this rank's background writer has done since the last call; it costs next to nothing."""
        for reply in self._writer.replies() if self._writer is not None else []:
            self._tell(reply)

    def _hear_all(self) -> None:
        """Let rank 0 print what other ranks' writers complained of: the first complaint, as the others are like it."""
        self.poll()
        complaints = [(rank, replies[0]) for rank, replies in enumerate(gather(self._unheard)) if replies]
        self._unheard = []
        if complaints and dist.get_rank() == 0:
            rank, reply = complaints[0]
            others = f" (and {len(complaints) - 1} other ranks)" if len(complaints) > 1 else ""
            self._tell({**reply, "reason": f"rank {rank}{others}: {reply['reason']}"})

    def _tell(self, reply: dict[str, Any]) -> None:
        """A row of events.jsonl and, where something went wrong, a line for the person who watches."""
        if dist.get_rank() != 0:
            # a save that failed is told by rank 0's writer, or by all ranks alike
            self._unheard += [reply] if reply["event"] == "after_save_failed" else []
            return
        reply = dict(reply)
        kind, step, reason = reply.pop("event"), reply.pop("step", 0), reply.pop("reason", "")
        self._folder.event(kind, step=step, reason=reason, **reply)
        if kind in ("save", "save_failed"):
            self._failure = reason
        if reason:
            self._screen.line(f"warning: {kind.replace('_', ' ')} at step {step}: {reason}")
        elif kind == "save":
            self._screen.line(self._saved(Path(reply["path"]), reply.get("bytes"), reply.get("seconds")))

    def _saved(self, path: Path, num_bytes: int | None, seconds: float | None) -> str:
        """The line of a saved checkpoint. Size and time are unknown if its writer ended before it replied."""
        line = f"saved {self._folder.path / 'checkpoints' / path.name}"
        if num_bytes is None or seconds is None:
            return line
        return f"{line} ({num_bytes / 1e6:,.1f} MB, {seconds:.1f} s{' in the background' * self._plan.args.async_save})"

    def close(self, *, wait_for_copies: bool) -> None:
        """Wait for what is being saved and, if asked, mirrored; otherwise the writers end that by themselves.

        Raises SaveError, on every rank, where the last checkpoint is not there.
        """
        wait_until_all(self._is_idle if wait_for_copies else lambda: not self._is_saving())
        self._hear_all()
        if self._writer is not None:
            self._writer.close()
        failure = from_rank_0(lambda: self._failure)
        if failure:
            raise SaveError(f"the last checkpoint was not written: {failure}")
