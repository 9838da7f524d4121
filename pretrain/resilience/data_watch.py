"""Watch the training data while a run trains: hash every byte of it once, and notice when its files change."""

import time
from collections.abc import Callable

from pretrain.checkpoint.load.resume import Resume
from pretrain.checkpoint.load.same_data import expected_sources
from pretrain.config.validate import Plan
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.source_watch import SourceWatch
from pretrain.terminal.screen import Screen

_FAST_S = 0.5  # data that is hashed within this time is hashed before the first step
_POLL_S = 1.0  # between two looks at the hashing process
_STATUS_S = 5.0  # between two looks at the files


class DataWatch:
    """Watch of the training data; only rank 0 watches. `poll` costs a microsecond most of the time.

    The sources are hashed one after another. `reject` is called with one line if the run must not continue. It makes
    all ranks stop, without a save.
    """

    def __init__(self, plan: Plan, resume: Resume | None, *, reject: Callable[[str], None], folder: RunFolder,
                 screen: Screen, active: bool) -> None:
        self.sources: list[SourceWatch] = []
        self._next_poll = self._next_status = 0.0
        if not active:
            return
        sources = plan.datasets["train"].sources
        expected: list[str | None] = [None] * len(sources)
        if resume is not None and not resume.manifest.weights_only and not resume.other_data:
            expected = expected_sources(resume.manifest, plan, resume.run)
        if resume is not None and resume.other_data:
            folder.event("other_data", step=resume.manifest.step, reason=resume.other_data)
        origin = f"{resume.folder} was trained on" if resume is not None else ""
        self.sources = [SourceWatch(plan, indexed, expected=sha256, origin=origin, reject=reject, folder=folder,
                                    screen=screen) for indexed, sha256 in zip(sources, expected, strict=True)]
        end = time.monotonic() + _FAST_S
        for source in self.sources:
            if source.needs_hash and (time.monotonic() < end or source is self.sources[0]):
                source.hash_now(end - time.monotonic())
        self._start_next()

    def _start_next(self) -> None:
        """Hash the next source in the background, if no other one is being hashed."""
        if any(source.is_hashing for source in self.sources):
            return
        waiting = next((source for source in self.sources if source.needs_hash), None)
        if waiting is not None:
            waiting.start_process()

    def poll(self, step: int) -> None:
        """Read new hashes and look at the files, if it is time."""
        now = time.monotonic()
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

    def close(self) -> None:
        """Stop hashing, and keep the hashes so far for the next start."""
        for source in self.sources:
            source.close()
