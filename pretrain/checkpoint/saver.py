"""When and how the loop's checkpoints are written: at once or in the background, and what comes after each."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.check import Plan
from pretrain.checkpoint.background import BackgroundWriter
from pretrain.checkpoint.commit import SaveError
from pretrain.checkpoint.manifest import read_manifest
from pretrain.checkpoint.store import begin_save, describe, save_checkpoint, write_files
from pretrain.checkpoint.verify import share
from pretrain.checkpoint.writer import After, Job
from pretrain.metrics.run_folder import RunFolder, versions


class Saver:
    """Saves as the flags ask. A save that fails is told, and training goes on; only the last one may not fail."""

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        args = plan.args
        self._plan, self._folder = plan, folder
        self._checkpoints = folder.path.absolute() / "checkpoints"
        self._after = After(keep_checkpoints=args.keep_checkpoints, keep_every=args.keep_every,
                            keep_best=args.keep_best, mirror=args.checkpoint_mirror)
        in_background = args.async_save or args.checkpoint_mirror or (args.keep_checkpoints and dist.get_rank() == 0)
        self._writer = BackgroundWriter(self._checkpoints, dist.get_rank()) if in_background else None
        self._failure = ""  # of the newest save

    def save(self, engine: DeepSpeedEngine, *, step: int, consumed_samples: int, eval_loss: float | None,
             last: bool) -> None:
        """Save, or begin to; collective. Training waits for the copy in host memory, or for the disk."""
        start = time.perf_counter()
        cursor: dict[str, Any] = {"step": step, "consumed_samples": consumed_samples}
        try:
            if self._plan.args.async_save:
                if not self._free(step, wait=last or self._plan.args.save_busy == "wait"):
                    return
                self._begin(engine, cursor, eval_loss)
                self._folder.event("snapshot", step=step, seconds=round(time.perf_counter() - start, 3))
            else:
                self._write(engine, cursor, eval_loss, start)
        except SaveError as error:
            self._tell({"event": "save_failed", "step": step, "reason": str(error)})

    def _write(self, engine: DeepSpeedEngine, cursor: dict[str, Any], eval_loss: float | None, start: float) -> None:
        saved = save_checkpoint(engine, self._plan, self._checkpoints, versions=versions(), eval_loss=eval_loss,
                                **cursor)
        self._tell({"event": "save", "step": cursor["step"], "path": str(saved),
                    "seconds": round(time.perf_counter() - start, 3)})
        if self._writer is not None:
            sizes = {name: record.bytes for name, record in read_manifest(saved).files.items()}
            names = share(sizes, dist.get_rank(), dist.get_world_size())
            self._writer.submit(self._job(cursor["step"], saved, names=names, committed=True))

    def _begin(self, engine: DeepSpeedEngine, cursor: dict[str, Any], eval_loss: float | None) -> None:
        """Copy this rank's files into host memory, and let the writer do the rest."""
        assert self._writer is not None
        temporary, save_id = begin_save(self._plan, self._checkpoints, cursor["step"])
        snapshot = self._writer.snapshot
        snapshot.clear()
        error = write_files(engine, temporary, lambda path: snapshot.open_file(path.name), **cursor)
        manifest = describe(engine, self._plan, versions=versions(), eval_loss=eval_loss, **cursor)
        final = self._checkpoints / f"global_step{cursor['step']}"
        self._writer.submit(self._job(
            cursor["step"], final, temporary=str(temporary), save_id=save_id, files=list(snapshot.files), error=error,
            names=[region.name for region in snapshot.files],
            manifest=manifest.to_json() if dist.get_rank() == 0 else None))

    def _job(self, step: int, final: Path, **details: Any) -> Job:
        return Job(**{"step": step, "final": str(final), "rank": dist.get_rank(), "world_size": dist.get_world_size(),
                      "timeout_s": self._plan.args.save_timeout, "after": self._after, "temporary": "", "save_id": "",
                      "files": [], "names": [], "error": None, "manifest": None, "committed": False, **details})

    def _free(self, step: int, *, wait: bool) -> bool:
        """Whether the snapshot's memory can be used again, the same on every rank."""
        assert self._writer is not None
        for reply in self._writer.wait_saved() if wait else self._writer.replies():
            self._tell(reply)
        busy: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(busy, self._writer.busy)
        if any(busy):
            self._tell({"event": "save_skipped", "step": step, "reason": "the save before is still being written"})
        return not any(busy)

    def _tell(self, reply: dict[str, Any]) -> None:
        """A row of events.jsonl and, where something went wrong, a line for the person who watches."""
        kind, step, reason = reply.pop("event"), reply.pop("step", 0), reply.pop("reason", "")
        self._folder.event(kind, step=step, reason=reason, **reply)
        if kind == "save":
            self._failure = ""
        if reason and dist.get_rank() == 0:
            print(f"warning: {kind.replace('_', ' ')} at step {step}: {reason}", flush=True)
        if kind == "save_failed":
            self._failure = reason

    def close(self) -> None:
        """Wait for what is under way. Raises SaveError, on every rank, where the last checkpoint is not there."""
        if self._writer is not None:
            for reply in self._writer.close():
                self._tell(reply)
        failure = [self._failure]
        dist.broadcast_object_list(failure, src=0)
        if failure[0]:
            raise SaveError(f"the last checkpoint was not written: {failure[0]}")
