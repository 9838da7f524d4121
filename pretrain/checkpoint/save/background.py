"""Control the background writer (`writer.py`) from the training process: snapshots in memory, jobs and replies."""

import contextlib
import dataclasses
import json
import mmap
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.checkpoint.save.writer import Region, SaveJob, committed_manifest, report_failure
from pretrain.child import child_command

Reply = dict[str, Any]
WRITER_MODULE = "pretrain.checkpoint.save.writer"
_ENDED = "the background writer has ended"
_START_TIMEOUT_S = 60.0
_GROWTH_BYTES = 1 << 26  # the memory grows by multiples of this size


class BackgroundWriter:
    """One rank's writer process, and the memory that it shares with the training process.

    The start waits for the process. All other methods return immediately.
    """

    def __init__(self, checkpoints: Path, rank: int) -> None:
        self.snapshot = Snapshot()
        self._saves: list[SaveJob] = []  # jobs with a snapshot whose save has no reply yet, oldest first
        self._process: subprocess.Popen[str] | None = None
        self._num_unfinished = 0  # jobs that are not finished; mirroring and pruning belong to a job
        with contextlib.suppress(OSError):  # a full disk, for example: then the writer ends, and each save reports it
            checkpoints.mkdir(parents=True, exist_ok=True)
        self._arguments = [str(self.snapshot.descriptor), str(checkpoints), str(rank)]
        self._start()

    def _start(self) -> None:
        """Start the writer and wait until it holds its lock, which shows the other ranks that it is running.

        If the system starts no process now, all jobs fail until `restart_if_ended`: the other ranks may have a writer.
        """
        self._replies: queue.Queue[Reply | None] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                child_command(WRITER_MODULE, *self._arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=[self.snapshot.descriptor], text=True, start_new_session=True)
        except OSError:  # no memory, for example, or no process id is left
            self._process, self._ended = None, True
            return
        self._process.wait()  # this process forks and exits; the writer is its orphaned child
        threading.Thread(target=self._listen, args=(self._process, self._replies), daemon=True).start()
        self._ended = False
        with contextlib.suppress(queue.Empty):
            self._ended = self._replies.get(timeout=_START_TIMEOUT_S) is None

    @staticmethod
    def _listen(process: subprocess.Popen[str], replies: "queue.Queue[Reply | None]") -> None:
        """Put each reply of the writer into the queue, and None when the writer has ended."""
        assert process.stdout is not None
        try:
            for line in process.stdout:
                replies.put(json.loads(line))
        finally:
            replies.put(None)

    def submit(self, job: SaveJob) -> None:
        """Send the writer a job. The snapshot's memory must not be changed while `saving` is true."""
        if job.snapshot is not None:
            self._saves.append(job)
        self._num_unfinished += 1
        if self._ended:
            self._replies.put(None)
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the writer has ended, and `_listen` reports it
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()

    @property
    def saving(self) -> bool:
        """True while a snapshot is being written or (on rank 0) committed, according to the replies read until now."""
        return bool(self._saves)

    @property
    def idle(self) -> bool:
        """True if all jobs and their mirroring are finished, according to the replies that were read so far."""
        return not self._saves and self._num_unfinished == 0

    def replies(self) -> list[Reply]:
        """Return the replies since the last call, except those that need no report."""
        found: list[Reply] = []
        while not self._replies.empty():
            found += self._handle(self._replies.get())
        return found

    def restart_if_ended(self) -> None:
        """Start a new writer if the old one has ended. `replies` must have reported its unfinished jobs before."""
        if self._ended:
            self._start()

    def close(self) -> None:
        """Close the writer's standard input, so that it exits after its last job."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self.snapshot.close()

    def _handle(self, reply: Reply | None) -> list[Reply]:
        """Update the counters for one reply; None means that the writer has ended. Return the replies to report."""
        if reply is None:
            return self._handle_end()
        event = reply["event"]
        if event in ("save", "save_failed"):
            self._saves.pop(0)
        if event in ("after_save", "save_failed"):
            self._num_unfinished -= 1
        return [] if event == "after_save" else [reply]

    def _handle_end(self) -> list[Reply]:
        """Return replies for the jobs that the writer left unfinished.

        Rank 0's writer waits for this rank's files, so lost saves are reported to it too.
        """
        self._ended = True
        lost, self._saves = self._saves, []
        num_unfinished, self._num_unfinished = self._num_unfinished - len(lost), 0
        replies: list[Reply] = []
        for job in lost:
            committed = committed_manifest(job)
            if committed is not None:  # the writer ended between the commit and its reply
                replies.append({"event": "save", "step": job.step, "path": job.final, "finite": committed.is_good})
            else:
                report_failure(job, _ENDED)
                replies.append({"event": "save_failed", "step": job.step, "reason": _ENDED})
        if num_unfinished > 0:
            replies.append({"event": "after_save_failed", "reason": f"{_ENDED} before it had mirrored and pruned"})
        return replies


class Snapshot:
    """One rank's files of one checkpoint, stored one after another in anonymous shared memory (memfd_create(2)).

    The next snapshot reuses the memory. The writer process inherits `descriptor`, so it can still write the snapshot
    after the training process was killed.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ds-pretrain-snapshot", 0)
        os.ftruncate(self.descriptor, _GROWTH_BYTES)
        self._memory = mmap.mmap(self.descriptor, _GROWTH_BYTES)
        self.files: list[Region] = []
        self._end = 0

    def clear(self) -> None:
        """Remove the files, but keep the memory."""
        self.files, self._end = [], 0

    @contextlib.contextmanager
    def open_file(self, name: str) -> Iterator["Snapshot"]:
        """Collect what is written in the block. At its end, unless it fails, this becomes a file in `files`."""
        start = self._end
        yield self
        self.files.append(Region(name, start, self._end - start))

    def write(self, data: bytes | memoryview) -> int:
        """Append a copy of `data` and return its length in bytes."""
        with memoryview(data) as view, view.cast("B") as source:
            end = self._end + source.nbytes
            if end > len(self._memory):
                self._memory.resize(max(end, 2 * len(self._memory)) // _GROWTH_BYTES * _GROWTH_BYTES + _GROWTH_BYTES)
            self._memory[self._end:end] = source
            self._end = end
            return source.nbytes

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def close(self) -> None:
        """Release this process's mapping and descriptor."""
        self._memory.close()
        os.close(self.descriptor)
