"""The process that follows a run (see `start.py`).

    python -m pretrain.monitor.follow.follower   (the first line of stdin: the JSON of `FollowRequest`)

The pipe is also how its owner reports the end of the run: a line of JSON, or none if the owner was killed.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.config.flags.receivers import read_urls, silence_apprise
from pretrain.monitor.follow.messages import (
    Message,
    RunFacts,
    message_of_end,
    message_of_event,
    message_of_restart,
)
from pretrain.monitor.follow.metrics_server import Values, serve
from pretrain.monitor.follow.send import (
    Grouping,
    Senders,
    apprise_sender,
    command_sender,
    now,
    print_warning,
)
from pretrain.monitor.follow.start import CLOSE_S, FILES, SUPERVISOR, FollowRequest

_POLL_S = 0.5
_END_BYTES = 2**18  # of an existing metrics.jsonl: they hold the newest rows
_LAYOUT = ("world_size", "zero_stage", "precision")
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class NewRows:
    """Reads the rows that are appended to a .jsonl file."""

    path: Path
    offset: int = 0

    def take(self, end: int | None = None) -> list[dict[str, Any]]:
        """Return the new complete rows before byte `end`. Lines that are no JSON object are skipped."""
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read() if end is None else file.read(max(end - self.offset, 0))
            data = data[:data.rfind(b"\n") + 1]
            self.offset += len(data)
            for line in data.splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    rows += [row] if isinstance(row, dict) else []
        return rows


@dataclass
class Follower:
    """Follows one run. `send` gets each message that is not grouped."""

    request: FollowRequest
    send: Callable[[Message], None]
    values: Values = field(default_factory=Values)
    grouping: Grouping = field(default_factory=Grouping)

    def __post_init__(self) -> None:
        run = Path(self.request.run)
        self.facts = RunFacts(run)
        self._metrics, self._events, self._restarts = (NewRows(run / name, self.request.sizes[name]) for name in FILES)
        for row in NewRows(run / "events.jsonl").take(self._events.offset):  # earlier starts: counted, and not sent
            if isinstance(row.get("event"), str):
                self.values.see_event(row)
        end = self._metrics.offset
        for row in NewRows(run / "metrics.jsonl", max(end - _END_BYTES, 0)).take(end):
            self.values.see_row(row)
        self._last_row, self._is_silent, self._told_end = now(), False, False
        self._spike_step: object = None
        self._read_record()

    def poll(self) -> None:
        """Read the new rows, and send what they say."""
        metrics, events, restarts = (rows.take() for rows in (self._metrics, self._events, self._restarts))
        for row in metrics:
            self.values.see_row(row)
        self.facts.row = self.values.row or None
        for row in events:
            if isinstance(row.get("event"), str):
                self._see_event(row)
        for row in restarts:
            self._told_end = self._told_end or "summary" in row
            self._add(message_of_restart(row, self.facts))
        if metrics or events or restarts:
            self._last_row, self._is_silent = now(), False
        self._check_silence()
        for message in self.grouping.take_due(now()):
            self.send(message)

    def end(self, report: dict[str, Any] | None) -> None:
        """Read the last rows, and report the end of the run if they do not. `report`: of the owner."""
        self.poll()
        if not self._told_end:
            self._add(message_of_end(report, self.request.owner, self.facts))
        for message in self.grouping.take_due(now(), everything=True):
            self.send(message)

    def _see_event(self, row: dict[str, Any]) -> None:
        supervised = self.request.owner == SUPERVISOR
        self.values.see_event(row)
        if row["event"] == "start":
            self._read_record()
        if not supervised:
            self._told_end = row["event"] in ("stop", "hang") or (self._told_end and row["event"] != "start")
        if row["event"] != "spike" or row.get("step") != self._spike_step:  # one message for loss and gradient norm
            self._add(message_of_event(row, self.facts, supervised=supervised))
        self._spike_step = row.get("step") if row["event"] == "spike" else self._spike_step

    def _add(self, message: Message | None) -> None:
        if message is not None and message.kind in self.request.kinds:
            for each in self.grouping.add(message, now()):
                self.send(each)

    def _check_silence(self) -> None:
        silent_s = now() - self._last_row
        if silent_s > self.request.silence_s and not self._is_silent:
            self._is_silent = True
            self._add(self.facts.message("no_progress", f"no progress for {silent_s / 60:.3g} minutes"))

    def _read_record(self) -> None:
        """Read the newest record of run.json, if there is one."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record = json.loads((self.facts.run / "run.json").read_text(encoding="utf-8"))[-1]
            self.facts.host, self.facts.train_steps = str(record["hardware"][0]["host"]), int(record["train_steps"])
            self.values.train_steps = self.facts.train_steps
            self.values.info = {"run": self.facts.run.name, "folder": str(self.facts.run), "host": self.facts.host,
                                "model": str(record["flags"]["model"]),
                                **{key: str(record["layout"][key]) for key in _LAYOUT}}


def follow(request: FollowRequest) -> None:
    """Follow the run until its owner reports its end, or ends."""
    silence_apprise()
    receivers = [(f"--notify {name}", apprise_sender(urls))
                 for name, urls in read_urls(request.variables, os.environ).items()]
    receivers += [("--notify_command", command_sender(request.command, request.directory))] if request.command else []
    senders = Senders(receivers, print_warning)
    follower = Follower(request, senders.send)
    if request.port:
        try:
            serve(follower.values, request.port, request.address)
        except OSError as error:  # another program took the port since it was checked
            print_warning(f"warning: --metrics_port {request.port}: {error.strerror}; the run has no metrics there")
    owner, report = os.getppid(), None
    while os.getppid() == owner:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            with contextlib.suppress(ValueError):
                report = json.loads(sys.stdin.readline())
            break
        follower.poll()
    threading.Timer(CLOSE_S, os._exit, [0]).start()  # a disk or a receiver may not answer
    follower.end(report)
    senders.close(CLOSE_S)


if __name__ == "__main__":
    for number in _IGNORED:  # launchers send these to all processes; this one ends after its owner
        signal.signal(number, signal.SIG_IGN)
    follow(FollowRequest(**json.loads(sys.stdin.readline())))
    os._exit(0)  # a thread may wait for a receiver
