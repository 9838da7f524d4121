"""Save checkpoints of the training loop, synchronously or in the background; then mirror and prune them."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.manifest import NOT_FINITE
from pretrain.checkpoint.format.run_checkpoints import has_ended
from pretrain.checkpoint.format.verify import files_of_rank
from pretrain.checkpoint.save.background import BackgroundWriter
from pretrain.checkpoint.save.save_checkpoint import begin_save, manifest_of_engine, save_checkpoint, write_files
from pretrain.checkpoint.save.writer import SaveJob, SnapshotFiles
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import any_rank, from_rank_0, gather, wait_until_all
from pretrain.errors import SaveError
from pretrain.monitor.announce import stopped_by_guard
from pretrain.monitor.environment import versions
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal import Screen


class Saver:
    """Saves checkpoints according to the flags. All public methods except `poll` are collective.

    A failed save is reported, and training continues. If the last save of the run failed, `close` raises SaveError.
    """

    def __init__(self, plan: Plan, folder: RunFolder, screen: Screen) -> None:
        args = plan.args
        self._plan, self._folder, self._screen = plan, folder, screen
        self._checkpoints = folder.path.absolute() / "checkpoints"
        in_background = args.async_save or args.checkpoint_mirror or (args.keep_checkpoints and dist.get_rank() == 0)
        self._writer = BackgroundWriter(self._checkpoints, dist.get_rank()) if in_background else None
        self.committed_step = 0  # step of the newest checkpoint that was committed; on rank 0
        self._failure = ""  # why the newest save failed; "" if it succeeded
        self._newest_is_good = True  # whether the newest saved checkpoint is finite
        self._unreported: list[dict[str, Any]] = []  # errors of this rank's writer that rank 0 has to print
        # now all writers hold their locks; a rank to which rank 0's lock seems free does not see locks of other hosts
        dist.barrier()
        self._locks_are_shared = not any_rank(self._writer is not None and has_ended(self._checkpoints, 0))

    def save(self, engine: DeepSpeedEngine, *, step: int, consumed_samples: int, eval_loss: float | None,
             wait: bool, prune: bool = True) -> None:
        """Save a checkpoint, or with --async_save copy it to host memory and write it in the background.

        If the previous checkpoint is still being written, `wait` overrides `--save_busy skip`. Without `prune`, all
        older checkpoints remain until the next save.
        """
        start = time.perf_counter()
        self._screen.status(f"step {step}  saving a checkpoint")
        self._report_other_ranks()
        position: dict[str, Any] = {"step": step, "consumed_samples": consumed_samples, "versions": versions(),
                                    "eval_loss": eval_loss}
        try:
            if not self._plan.args.async_save:
                self._write(engine, position, start, prune=prune)
            elif self._memory_is_free(step, wait=wait or self._plan.args.save_busy == "wait"):
                self._begin(engine, position, prune=prune)
                dist.barrier()  # after this the checkpoint is not lost even if all training processes are killed
                self._folder.event("snapshot", step=step, seconds=round(time.perf_counter() - start, 3))
        except SaveError as error:
            self._report({"event": "save_failed", "step": step, "reason": str(error)})

    def _write(self, engine: DeepSpeedEngine, position: dict[str, Any], start: float, *, prune: bool) -> None:
        """Write and commit a checkpoint, then send the writer a job to mirror and prune."""
        saved = save_checkpoint(engine, self._plan, self._checkpoints, **position)
        manifest = saved.manifest
        self._report({"event": "save", "step": position["step"], "path": str(saved.folder),
                      "bytes": manifest.num_bytes, "finite": manifest.is_good,
                      "seconds": round(time.perf_counter() - start, 3)})
        if self._writer is not None:
            self._writer.restart_if_ended()
            names = files_of_rank(manifest.sizes, dist.get_rank(), dist.get_world_size())
            self._writer.submit(self._job(position["step"], manifest.save_id, names, snapshot=None, prune=prune))

    def _begin(self, engine: DeepSpeedEngine, position: dict[str, Any], *, prune: bool) -> None:
        """Copy this rank's files into host memory, then send the writer a job to write and commit them."""
        assert self._writer is not None
        self._writer.restart_if_ended()
        temporary, save_id = begin_save(self._plan, self._checkpoints, position["step"])
        memory = self._writer.snapshot
        memory.clear()
        error, finite = write_files(engine, temporary, lambda path: memory.open_file(path.name), step=position["step"],
                                    consumed_samples=position["consumed_samples"])
        manifest = manifest_of_engine(engine, self._plan, save_id=save_id, **position)
        names = [region.name for region in memory.files]
        files = SnapshotFiles(str(temporary), list(memory.files), error,
                              finite, manifest.to_json() if dist.get_rank() == 0 else None)
        self._writer.submit(self._job(position["step"], save_id, names, snapshot=files, prune=prune))

    def _job(self, step: int, save_id: str, names: list[str], snapshot: SnapshotFiles | None, *,
             prune: bool) -> SaveJob:
        args = self._plan.args
        keep = {"keep_checkpoints": args.keep_checkpoints if prune else 0, "keep_every": args.keep_every,
                "keep_best": args.keep_best}
        return SaveJob(step=step, final=str(self._checkpoints / f"global_step{step}"), rank=dist.get_rank(),
                       world_size=dist.get_world_size(), save_id=save_id, timeout_s=args.save_timeout,
                       locks_are_shared=self._locks_are_shared, names=names, mirror=args.checkpoint_mirror, keep=keep,
                       snapshot=snapshot)

    def _memory_is_free(self, step: int, *, wait: bool) -> bool:
        """Return whether all ranks can reuse the memory of the previous snapshot. With `wait`, wait until they can."""
        if wait:
            wait_until_all(lambda: not self._is_saving())
        elif any_rank(self._is_saving()):
            self._report({"event": "save_skipped", "step": step,
                          "reason": "the previous save is still being written"})
            return False
        return True

    def _is_saving(self) -> bool:
        self.poll()
        return self._writer is not None and self._writer.saving

    def _is_idle(self) -> bool:
        self.poll()
        return self._writer is None or self._writer.idle

    def poll(self) -> None:
        """Report the replies of this rank's background writer since the last call, without blocking."""
        for reply in self._writer.replies() if self._writer is not None else []:
            self._report(reply)

    def _report_other_ranks(self) -> None:
        """Report the errors of other ranks' writers on rank 0: the first error, and the number of further ranks."""
        self.poll()
        all_ranks = gather(self._unreported) if any_rank(bool(self._unreported)) else []
        errors = [(rank, replies[0]) for rank, replies in enumerate(all_ranks) if replies]
        self._unreported = []
        if errors and dist.get_rank() == 0:
            rank, reply = errors[0]
            others = f" (and {len(errors) - 1} other ranks)" if len(errors) > 1 else ""
            self._report({**reply, "reason": f"rank {rank}{others}: {reply['reason']}"})

    def _report(self, reply: dict[str, Any]) -> None:
        """Write a row of events.jsonl, and a line on the screen for errors and finished saves."""
        if dist.get_rank() != 0:
            # rank 0 reports failed saves without this, because its writer waits for all ranks
            if reply["event"] == "after_save_failed":
                self._unreported.append(reply)
            return
        reply = dict(reply)
        event, step, reason = reply.pop("event"), reply.pop("step", 0), reply.pop("reason", "")
        if event == "save":
            self.committed_step, self._newest_is_good = step, reply["finite"]
            reason = "" if reply["finite"] else NOT_FINITE
            line = self._saved_line(Path(reply["path"]), reply.get("bytes"), reply.get("seconds"))
            self._screen.line(line if reply["finite"] else f"warning: {line}, but {NOT_FINITE}: no run resumes from it")
        elif reason:
            self._screen.line(f"warning: {event.replace('_', ' ')} at step {step}: {reason}")
        self._folder.event(event, step=step, reason=reason, **reply)
        if event in ("save", "save_failed"):
            self._failure = reason if event == "save_failed" else ""

    def _saved_line(self, path: Path, num_bytes: int | None, seconds: float | None) -> str:
        """Describe a saved checkpoint in one line. They are None if the writer ended before its reply."""
        line = f"saved {self._folder.path / 'checkpoints' / path.name}"
        if num_bytes is None or seconds is None:
            return line
        where = " in the background" if self._plan.args.async_save else ""
        return f"{line} ({num_bytes / 1e6:,.1f} MB, {seconds:.1f} s{where})"

    def wait(self) -> None:
        """Wait until all saves are committed, mirrored and pruned."""
        wait_until_all(self._is_idle)
        self._report_other_ranks()

    def return_to(self, step: int) -> None:
        """Forget the saves after the checkpoint of `step`, because the run was rolled back to it."""
        self.committed_step, self._newest_is_good = step, True

    def close(self, *, wait_for_copies: bool) -> None:
        """Wait until the last save is committed and, with `wait_for_copies`, mirrored and pruned.

        Without `wait_for_copies` the writers continue to mirror and prune after this call. Raises SaveError on every
        rank if the last checkpoint was not written. Raises GuardError if the last checkpoint of a finished run has NaN
        or infinity.
        """
        wait_until_all(self._is_idle if wait_for_copies else lambda: not self._is_saving())
        self._report_other_ranks()
        if self._writer is not None:
            self._writer.close()
        failure, is_good = from_rank_0(lambda: (self._failure, self._newest_is_good))
        if failure:
            raise SaveError(f"the last checkpoint was not written: {failure}. Remove the reason, and give the same "
                            "command: the run continues from its newest checkpoint.")
        if not is_good and wait_for_copies:
            line = f"{self._folder.path}: in the last checkpoint, {NOT_FINITE}. The newest good checkpoint remains. " \
                "Lower the learning rate, and start another run with --init_from, or examine the checkpoint."
            raise stopped_by_guard(self._folder, self.committed_step, line)
