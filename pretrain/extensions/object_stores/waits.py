"""Reads of a run wait for object stores without a limit of time; the waits are reported, and recorded."""

import time

from pretrain.callback import Callback, Run
from pretrain.cli import say
from pretrain.extensions.object_stores.token_file import RemoteTokenFile

_POLL_S = 1.0  # between two looks at the waits that are over


class StoreWaits(Callback):
    """Lets each rank wait for its data for as long as the store does not answer, and records the waits of rank 0."""

    order = 1  # other callbacks read data when they start

    def __init__(self) -> None:
        self._next_poll = 0.0

    def start(self, run: Run) -> None:
        def report(line: str, waits: bool) -> None:
            run.watchdog.note(line if waits else "")
            if run.world.rank == 0:
                run.screen.line(f"warning: {line}" if waits else line)
            else:
                say(f"rank {run.world.rank}: {line}")

        for dataset in run.plan.datasets.values():
            for source in dataset.sources:
                if isinstance(source.file, RemoteTokenFile):
                    source.file.wait_without_limit(report)
        self._files = [source.file for source in run.plan.datasets["train"].sources
                       if isinstance(source.file, RemoteTokenFile)]

    def end_step(self, run: Run) -> None:
        """Record that a store did not answer for some time and answers again."""
        now = time.monotonic()
        if run.world.rank != 0 or now < self._next_poll:
            return
        self._next_poll = now + _POLL_S
        for file in self._files:
            (seconds, answer), file.remote.last_wait = file.remote.last_wait, (0.0, "")
            if seconds:
                run.event("store_wait", reason=answer, seconds=round(seconds, 1), name=file.path)
