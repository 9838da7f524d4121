"""The training process's end of `writer.py`: start it, hand it jobs, hear what became of them."""

import contextlib
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
from pretrain.checkpoint.writer import Job, give_up

Reply = dict[str, Any]
WRITER_MODULE = "pretrain.checkpoint.writer"
_ENDED = "the background writer has ended"


class BackgroundWriter:
    """One rank's writer process and the memory that both share."""

    def __init__(self, checkpoints: Path, rank: int) -> None:
        self.snapshot = Snapshot()
        self._saves: list[Job] = []  # that have not been answered, the oldest first
        self._afters = 0  # likewise
        checkpoints.mkdir(parents=True, exist_ok=True)
        self._arguments = [str(self.snapshot.descriptor), str(checkpoints), str(rank)]
        self._start()

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", WRITER_MODULE, *self._arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=[self.snapshot.descriptor], text=True, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True)
        self._process.wait()  # it goes on as a process of its own
        self._replies: queue.Queue[Reply | None] = queue.Queue()
        self._ended = False
        threading.Thread(target=self._listen, args=(self._process, self._replies), daemon=True).start()

    @staticmethod
    def _listen(process: subprocess.Popen[str], replies: "queue.Queue[Reply | None]") -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                replies.put(json.loads(line))
        finally:
            replies.put(None)

    def submit(self, job: Job) -> None:
        """Give the writer a job; the snapshot's memory is its own until `wait_saved`."""
        if self._ended:
            self._start()
        self._saves += [] if job.committed else [job]
        self._afters += 1
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_listen` sees its end too
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()

    @property
    def busy(self) -> bool:
        """Whether the snapshot is still in use, as far as the replies that were taken tell."""
        return bool(self._saves)

    def replies(self) -> list[Reply]:
        """What the writer has told since the last call; does not wait."""
        told: list[Reply] = []
        while not self._replies.empty() and not self._ended:
            told += self._take()
        return told

    def wait_saved(self) -> list[Reply]:
        """Wait until the snapshot is written (on rank 0: and committed), and return the replies up to then."""
        told = self.replies()
        while self._saves:
            told += self._take()
        return told

    def close(self) -> list[Reply]:
        """Wait for all jobs, mirroring included, and let the process end."""
        told = self.replies()
        while self._afters > 0:
            told += self._take()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        while not self._ended:
            told += self._take()
        self.snapshot.close()
        return told

    def _take(self) -> list[Reply]:
        reply = self._replies.get()
        if reply is None:
            return self._end()
        kind = reply["event"]
        if kind in ("save", "save_failed"):
            self._saves.pop(0)
        self._afters -= kind in ("after_save", "save_failed")
        return [] if kind == "after_save" else [reply]

    def _end(self) -> list[Reply]:
        """The process is gone. What it leaves undone is told, to rank 0's writer too, which waits for its part."""
        self._ended, self._afters = True, 0
        lost, self._saves = self._saves, []
        for job in lost:
            with contextlib.suppress(OSError):
                give_up(job, _ENDED)
        return [{"event": "save_failed", "step": job.step, "reason": _ENDED} for job in lost]
