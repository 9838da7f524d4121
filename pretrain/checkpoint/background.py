"""The training process's end of `writer.py`: start it, hand it jobs, hear what became of them."""

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pretrain.checkpoint.snapshot import Snapshot
from pretrain.checkpoint.writer import Job

Reply = dict[str, Any]
WRITER_MODULE = "pretrain.checkpoint.writer"
_ENDED = {"event": "save_failed", "reason": "the background writer has ended"}


class BackgroundWriter:
    """One rank's writer process and the memory that both share."""

    def __init__(self, checkpoints: Path, rank: int) -> None:
        self.snapshot = Snapshot()
        self._saves = self._afters = 0  # jobs that have not been answered
        self._replies: queue.Queue[Reply | None] = queue.Queue()
        checkpoints.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", WRITER_MODULE, str(self.snapshot.descriptor), str(checkpoints), str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self.snapshot.descriptor], text=True,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
        self._process.wait()  # it goes on as a process of its own
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._replies.put(json.loads(line))
        finally:
            self._replies.put(None)

    def submit(self, job: Job) -> None:
        """Give the writer a job; the snapshot's memory is its own until `wait_saved`."""
        self._saves += not job.committed
        self._afters += 1
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_listen` sees its end too, and says so

    @property
    def busy(self) -> bool:
        """Whether the snapshot is still in use, as far as the replies that were taken tell."""
        return self._saves > 0

    def replies(self) -> list[Reply]:
        """What the writer has told since the last call; does not wait."""
        told: list[Reply] = []
        while not self._replies.empty():
            told += self._take()
        return told

    def wait_saved(self) -> list[Reply]:
        """Wait until the snapshot is written (on rank 0: and committed), and return the replies up to then."""
        told = self.replies()
        while self._saves > 0:
            told += self._take()
        return told

    def close(self) -> list[Reply]:
        """Wait for all jobs, mirroring included, and let the process end."""
        told = self.replies()
        while self._afters > 0:
            told += self._take()
        assert self._process.stdin is not None
        self._process.stdin.close()
        while self._take():
            pass
        self.snapshot.close()
        return told

    def _take(self) -> list[Reply]:
        reply = self._replies.get()
        if reply is None:
            self._replies.put(None)  # the end stays the end
            lost, self._saves, self._afters = self._saves > 0, 0, 0
            return [dict(_ENDED)] if lost else []
        kind = reply["event"]
        self._saves -= kind in ("save", "save_failed")
        self._afters -= kind in ("after_save", "save_failed")
        return [] if kind == "after_save" else [reply]
