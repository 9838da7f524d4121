"""The training process's end of `writer.py`: start it, hand it jobs, hear what became of them."""

import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pretrain.checkpoint.save.snapshot import Snapshot
from pretrain.checkpoint.save.writer import SaveJob, is_committed, report_failure
from pretrain.distributed.process import package_environment

Reply = dict[str, Any]
WRITER_MODULE = "pretrain.checkpoint.save.writer"
_ENDED = "the background writer has ended"
_PATIENCE_S = 60.0  # for a writer that starts


class BackgroundWriter:
    """One rank's writer process and the memory that both share. Nothing here waits for a disk."""

    def __init__(self, checkpoints: Path, rank: int) -> None:
        self.snapshot = Snapshot()
        self._saves: list[SaveJob] = []  # that have not been answered, the oldest first
        self._afters = 0  # likewise
        checkpoints.mkdir(parents=True, exist_ok=True)
        self._arguments = [str(self.snapshot.descriptor), str(checkpoints), str(rank)]
        self._start()

    def _start(self) -> None:
        """Returns when the writer holds its lock: other writers wait for its part from now on."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", WRITER_MODULE, *self._arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=[self.snapshot.descriptor], text=True, env=package_environment(), start_new_session=True)
        self._process.wait()  # it goes on as a process of its own
        self._replies: queue.Queue[Reply | None] = queue.Queue()
        threading.Thread(target=self._listen, args=(self._process, self._replies), daemon=True).start()
        self._ended = False
        with contextlib.suppress(queue.Empty):
            self._ended = self._replies.get(timeout=_PATIENCE_S) is None

    @staticmethod
    def _listen(process: subprocess.Popen[str], replies: "queue.Queue[Reply | None]") -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                replies.put(json.loads(line))
        finally:
            replies.put(None)

    def submit(self, job: SaveJob) -> None:
        """Give the writer a job; the snapshot's memory is its own as long as it is `saving`."""
        self._saves += [job] if job.snapshot is not None else []
        self._afters += 1
        if self._ended:
            self._replies.put(None)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_listen` sees its end too
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()

    @property
    def saving(self) -> bool:
        """Whether a snapshot is still being written or (on rank 0) committed, as far as the replies taken tell."""
        return bool(self._saves)

    @property
    def idle(self) -> bool:
        """Whether all is done, mirroring included; likewise."""
        return not self._saves and self._afters == 0

    def replies(self) -> list[Reply]:
        """What the writer has told since the last call."""
        told: list[Reply] = []
        while not self._replies.empty():
            told += self._take(self._replies.get())
        return told

    def start_again(self) -> None:
        """If it has ended. It was told by `replies`, and what it left undone too."""
        if self._ended:
            self._start()

    def close(self) -> None:
        """Let the process end when it has nothing left to do."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.snapshot.close()

    def _take(self, reply: Reply | None) -> list[Reply]:
        if reply is None:
            return self._end()
        kind = reply["event"]
        if kind in ("save", "save_failed"):
            self._saves.pop(0)
        self._afters -= kind in ("after_save", "save_failed")
        return [] if kind == "after_save" else [reply]

    def _end(self) -> list[Reply]:
        """The process is gone. What it leaves undone is told, to rank 0's writer too, which waits for its part."""
        self._ended = True
        lost, self._saves = self._saves, []
        afters, self._afters = self._afters - len(lost), 0
        replies: list[Reply] = []
        for job in lost:
            if is_committed(job):  # and died before it could say so
                replies.append({"event": "save", "step": job.step, "path": job.final})
            else:
                report_failure(job, _ENDED)
                replies.append({"event": "save_failed", "step": job.step, "reason": _ENDED})
        return replies + [{"event": "after_save_failed", "reason": f"{_ENDED} before it had copied or pruned"}] * (
            afters > 0)
