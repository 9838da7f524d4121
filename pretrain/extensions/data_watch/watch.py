"""Watch the training data while a run trains: hash every byte of it once, and notice when its files change."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.callback import Callback, Run
from pretrain.checkpoint.load.same_data import (
    HASHED_EVENT,
    OTHER_BYTES,
    expected_sources,
    fallback_path,
    stored_hashes,
)
from pretrain.config.flags.check_flags import allows_other_data
from pretrain.config.plan import Plan
from pretrain.data.token_files.check_hashes import hash_if_fast
from pretrain.data.token_files.hashes import BLOCK_BYTES, BackgroundHash, DataHashes, hashes_path, write_hashes
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.token_file import TokenFile
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.paths import status_of
from pretrain.terminal import Screen

_FAST_S = 0.5  # data that is hashed within this time is hashed before the first step
_POLL_S = 1.0  # between two looks at the hashing process
_STATUS_S = 5.0  # between two looks at the files
_STORE_S = 60.0  # between two writes of unfinished hashes


class DataWatch(Callback):
    """Watch of the training data; only rank 0 watches. A step costs a microsecond most of the time.

    The sources are hashed one after another. If the run must not continue, all ranks stop, without a save.
    """

    order = 80

    def __init__(self) -> None:
        self.sources: list[SourceWatch] = []
        self._next_poll = self._next_status = 0.0

    def start(self, run: Run) -> None:
        plan, folder, resume = run.plan, run.folder, run.resume
        if run.world.rank != 0:
            return
        sources = plan.datasets["train"].sources
        expected: list[str | None] = [None] * len(sources)
        if resume is not None and not resume.manifest.weights_only and not resume.other_data:
            expected = expected_sources(resume.manifest, plan, resume.run)
        origin = f"{resume.folder} was trained on" if resume is not None else ""
        self.sources = [SourceWatch(plan, indexed, expected=sha256, origin=origin, reject=run.reject, folder=folder,
                                    screen=run.screen) for indexed, sha256 in zip(sources, expected, strict=True)]
        end = time.monotonic() + _FAST_S
        for source in self.sources:
            if source.needs_hash and (time.monotonic() < end or source is self.sources[0] or source.is_remote):
                source.hash_now(end - time.monotonic())
        self._start_next()

    def _start_next(self) -> None:
        """Hash the next source in the background, if no other one is being hashed."""
        if any(source.is_hashing for source in self.sources):
            return
        waiting = next((source for source in self.sources if source.needs_hash), None)
        if waiting is not None:
            waiting.start_process()

    def end_step(self, run: Run) -> None:
        """Read new hashes and look at the files, if it is time."""
        now, step = time.monotonic(), run.step
        if not self.sources or now < self._next_poll or any(source.is_rejected for source in self.sources):
            return
        self._next_poll = now + _POLL_S
        looks_at_files = now >= self._next_status
        if looks_at_files:
            self._next_status = now + _STATUS_S
        for source in self.sources:
            if looks_at_files:
                source.check_files(step)
            if source.is_hashing and not source.is_rejected:
                source.read_hashes(step)
            if source.is_rejected:
                return
        self._start_next()

    def close(self, run: Run) -> None:
        """Stop hashing, and keep the hashes so far for the next start."""
        for source in self.sources:
            source.close()


def callbacks(plan: Plan) -> list[Callback]:
    """Return the watch of a run."""
    return [DataWatch()]


class SourceWatch:
    """Watch of one source of the training data, a token file, on rank 0.

    Args:
        expected: hash that the data must have; None: it is not known.
        origin: source of this hash, for messages.
        reject: called with one line if the run must not continue.
    """

    def __init__(self, plan: Plan, indexed: IndexedDataset, *, expected: str | None, origin: str,
                 reject: Callable[[str], None], folder: RunFolder, screen: Screen) -> None:
        self._plan, self._indexed, self._reject, self._folder, self._screen = plan, indexed, reject, folder, screen
        self._expected, self._origin = expected, origin
        self._process: BackgroundHash | None = None
        self._status, self._sampled = indexed.file.status(), indexed.sampled_bytes()
        self._next_store = 0.0
        self._is_replaced = self.is_rejected = self._has_failed = False
        found = stored_hashes(plan, indexed)
        self._blocks: list[str] = list(found.current.blocks) if found.current is not None else []
        self._reference: tuple[str, ...] = ()  # blocks of an earlier version of the data, which must be the same
        if found.earlier is not None and found.earlier.sha256 == expected and not allows_other_data(plan.args):
            self._reference = found.earlier.blocks
        if indexed.hashes is not None and (found.current is None or not found.current.is_complete):
            self._finish(indexed.hashes)  # hashed by `check_same_data`

    @property
    def needs_hash(self) -> bool:
        """True if the data has to be hashed, and no process does it."""
        return self._indexed.hashes is None and self._process is None and not (self.is_rejected or self._has_failed)

    @property
    def is_remote(self) -> bool:
        """True if the data is at a URL. It is hashed at the start or not at all."""
        return self._indexed.is_remote

    @property
    def is_hashing(self) -> bool:
        return self._process is not None

    def hash_now(self, seconds: float) -> None:
        """Hash the data if this takes less than `seconds`."""
        hash_if_fast(self._indexed, seconds)
        self._has_failed = self._indexed.is_remote  # it is not downloaded only to be hashed
        if self._indexed.hashes is not None:
            self._finish(self._indexed.hashes)

    def start_process(self) -> None:
        """Hash the data in the background."""
        hashes = self._hashes()
        index = None if self._indexed.idx_sha256 else self._indexed.index.file
        file = self._indexed.file
        assert isinstance(file, TokenFile)
        self._process = BackgroundHash(file, first=len(self._blocks), num_blocks=hashes.num_blocks,
                                       index=index)
        self._next_store = time.monotonic() + _STORE_S

    def _hashes(self) -> DataHashes:
        """Return the hashes of the blocks that have been hashed."""
        return self._indexed.new_hashes(self._status, tuple(self._blocks))

    def read_hashes(self, step: int) -> None:
        """Take the new hashes of the process, and compare them with the hashes of an earlier version of the data."""
        assert self._process is not None
        has_ended = self._process.has_ended  # before reading, so that nothing is left unread
        digests = self._process.read()
        if self._process.idx_sha256:
            self._indexed.idx_sha256 = self._process.idx_sha256
        for digest in digests:
            number = len(self._blocks)
            if number < len(self._reference) and digest != self._reference[number]:
                start = number * BLOCK_BYTES
                self._stop(f"bytes {start} to {min(start + BLOCK_BYTES, self._status.st_size)} are not those that "
                           f"{self._origin}")
                return
            self._blocks.append(digest)
        if self._hashes().is_complete:
            self._end_process()
            self.check_files(step)  # was it changed while it was hashed?
            if self._process is None and not self.is_rejected:
                self._finish(self._hashes(), step)
        elif has_ended:
            self._process, self._has_failed = None, True
            self._screen.line(f"warning: {self._indexed.bin_path}: the process that hashes it has failed; it will be "
                              "hashed at the next start")
        elif time.monotonic() >= self._next_store:
            self._next_store = time.monotonic() + _STORE_S
            self._store_unfinished()

    def _finish(self, hashes: DataHashes, step: int = 0) -> None:
        """Compare the hash of all data with the expected one, and store it."""
        if self._expected is not None and hashes.sha256 != self._expected:
            problem = f"the data has SHA-256 {hashes.sha256[:12]}, and that which {self._origin} has " \
                      f"{self._expected[:12]}"
            if not allows_other_data(self._plan.args):
                self._stop(problem, hashes.sha256)
                return
            self._screen.line(f"warning: {self._indexed.bin_path}: {problem}; --override data: training continues")
            self._folder.event("other_data", step=step, reason=problem)
        self._indexed.hashes = hashes
        self._record(hashes.sha256, step)
        self._store(hashes)

    def _record(self, sha256: str, step: int = 0) -> None:
        """Record the hash of the file as it is, for checkpoints that are saved before their data is hashed."""
        status = self._indexed.file.status()
        self._folder.event(HASHED_EVENT, step=step, sha256=sha256, bin_bytes=status.st_size,
                           bin_mtime_ns=status.st_mtime_ns, name=self._indexed.prefix.name)

    def _stop(self, problem: str, sha256: str = OTHER_BYTES) -> None:
        """Make all ranks stop, without a save. `sha256`: of the changed data."""
        self.is_rejected = True
        self._end_process()
        self._record(sha256)  # checkpoints that were trained on it do not resume with the restored file
        self._reject(f"{self._indexed.bin_path}: {problem}. No checkpoint was changed. Restore the file and start "
                     "again, or continue with the changed data by --override data.")

    def _store_unfinished(self) -> None:
        """Store the hashes so far, or take the hashes of another run that has finished."""
        found = stored_hashes(self._plan, self._indexed).current
        if found is not None and found.is_complete and self._process is not None:
            self._end_process()
            self._blocks = list(found.blocks)
            self._finish(found)
        elif self._blocks and not self._reference and (found is None or len(found.blocks) < len(self._blocks)):
            self._store(self._hashes())

    def _store(self, hashes: DataHashes) -> None:
        """Write the hashes next to the data, or into the run folder if the folder of the data is read-only."""
        if self._indexed.is_remote:  # one block, which each start hashes
            return
        reason = ""
        for path in (hashes_path(self._indexed.small_files), fallback_path(self._plan, self._indexed)):
            try:
                if _is_same_file(os.stat(str(self._indexed.bin_path)), self._status):  # else they belong to a new file
                    write_hashes(path, hashes)
                return
            except OSError as error:
                reason = f"{path}: {error.strerror or error}"
        self._screen.line(f"warning: the hashes of the data cannot be stored ({reason})")

    def check_files(self, step: int) -> None:
        """Look for changes of the .bin file that this run reads, and for another file that has its name.

        An extension that reads a file at a URL looks for them itself.
        """
        if self._indexed.is_remote:
            return
        path, status = Path(str(self._indexed.bin_path)), self._indexed.file.status()
        if status.st_size != self._status.st_size:
            self._stop(f"the file had {self._status.st_size:,} bytes when the run started, and has "
                       f"{status.st_size:,} now")
        elif status.st_mtime_ns != self._status.st_mtime_ns:
            self._check_changed(status, step)
        elif not self._is_replaced and not _has_name(path, status):
            self._is_replaced = True
            line = f"{path} was replaced or removed. This run continues to read the old file. A resume will compare " \
                   "the new one with it"
            self._screen.line(f"warning: {line}")
            self._folder.event("data_replaced", step=step, reason=line)

    def _check_changed(self, status: os.stat_result, step: int) -> None:
        """Reject a file whose samples have changed. Hash one that was only written again, and compare all blocks."""
        self._origin = "it had when the run started"
        if self._indexed.sampled_bytes() != self._sampled:
            self._stop("the file was changed while the run was training")
            return
        known, self._indexed.hashes = self._indexed.hashes, None
        line = f"{self._indexed.bin_path} was written to while the run was training: its bytes are compared with the " \
               "earlier ones"
        self._screen.line(f"warning: {line}")
        self._folder.event("data_changed", step=step, reason=line)
        self._reference = known.blocks if known is not None else max(tuple(self._blocks), self._reference, key=len)
        self._expected = known.sha256 if known is not None else self._expected
        self._end_process()
        self._status, self._blocks = status, []
        self.start_process()

    def close(self) -> None:
        """Stop hashing, and keep the hashes so far for the next start."""
        if self._process is None:
            return
        self._store_unfinished()
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _is_same_file(first: os.stat_result, second: os.stat_result) -> bool:
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _has_name(path: os.PathLike[str], status: os.stat_result) -> bool:
    """Return whether `path` still names the file with this status."""
    found = status_of(path)
    return found is not None and _is_same_file(found, status)
