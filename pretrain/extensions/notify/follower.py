"""The process that follows a run (see `start.py`).

    python pretrain/child.py pretrain.extensions.notify.follower     (first line of stdin: a request, as JSON)

The pipe is also how its owner reports the end of the run: a line of JSON, or none if the owner was killed.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.cli import say
from pretrain.errors import format_number
from pretrain.extension import SUPERVISOR
from pretrain.extensions.notify.extension import Notify
from pretrain.extensions.notify.messages import Message, RunState
from pretrain.extensions.notify.metrics_server import serve
from pretrain.extensions.notify.receivers import LOOPBACK, kinds_to_send, read_urls, silence_apprise
from pretrain.extensions.notify.send import Grouping, Send, Senders, apprise_sender, command_sender
from pretrain.extensions.notify.start import CLOSE_S, FILES
from pretrain.monitor.read_run_folder import Tail

_POLL_S = 0.5
_SILENCE_MINUTES = 30.0
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Follower:
    """Follows one run. `send` gets each message that is not grouped."""

    run: Path
    flags: Notify
    owner: str
    sizes: dict[str, int]  # file of FILES -> bytes before this start
    send: Callable[[Message], None]
    grouping: Grouping = field(default_factory=Grouping)

    def __post_init__(self) -> None:
        self.state, self._kinds = RunState(self.run), kinds_to_send(self.flags)
        self._files = [Tail(self.run / name, self.sizes[name]) for name in FILES]
        self._silence_s = (self.flags.notify_silence or _SILENCE_MINUTES) * 60
        self._last_row, self._is_silent, self._told_end = time.monotonic(), False, False
        self._spike_step: object = None
        self.state.read_record()

    def poll(self, *, everything: bool = False) -> None:
        """Read the new rows, and send what they say; with `everything`, also groups whose time is not over."""
        metrics, events, restarts = (tail.rows() for tail in self._files)
        for row in metrics:
            self.state.see_row(row)
        for row in events:
            if isinstance(row.get("event"), str):
                self._see_event(row)
        for row in restarts:
            self._told_end = self._told_end or "summary" in row
            self._add(self.state.message_of_restart(row))
        if metrics or events or restarts:
            self._last_row, self._is_silent = time.monotonic(), False
        silent_s = time.monotonic() - self._last_row
        if silent_s > self._silence_s and not self._is_silent:
            self._is_silent = True
            self._add(self.state.message("no_progress", f"no progress for {format_number(silent_s / 60)} minutes"))
        for message in self.grouping.take_due(time.monotonic(), everything=everything):
            self.send(message)

    def end(self, report: dict[str, Any] | None) -> None:
        """Read the last rows, and report the end of the run if they do not. `report`: of the owner."""
        self.poll(everything=True)
        if not self._told_end:
            self._add(self.state.message_of_end(report, self.owner))
        self.poll(everything=True)

    def _see_event(self, row: dict[str, Any]) -> None:
        event, step = row["event"], row.get("step")
        self.state.events = {**self.state.events, event: self.state.events.get(event, 0) + 1}
        if event == "start":
            self.state.read_record()
        if self.owner == SUPERVISOR and event == "stop":
            return  # restarts.jsonl has how starts end
        if self.owner != SUPERVISOR:
            self._told_end = event in ("stop", "hang") or (self._told_end and event != "start")
        if event != "spike" or step != self._spike_step:  # one message for loss and gradient norm
            self._add(self.state.message_of_event(row))
        self._spike_step = step if event == "spike" else self._spike_step

    def _add(self, message: Message | None) -> None:
        if message is not None and message.kind in self._kinds:
            for each in self.grouping.add(message, time.monotonic()):
                self.send(each)


def follow(request: dict[str, Any]) -> None:
    """Follow the run until its owner reports its end, or ends."""
    silence_apprise()
    flags = Notify(**request["flags"])
    receivers: dict[str, Send] = {f"--notify {name}": apprise_sender(urls)
                                  for name, urls in read_urls(flags, os.environ).items()}
    if flags.notify_command:
        receivers["--notify_command"] = command_sender(flags.notify_command, request["directory"])
    senders = Senders(receivers)
    follower, server = Follower(Path(request["run"]), flags, request["owner"], request["sizes"], senders.send), None
    if flags.metrics_port:
        try:
            server = serve(follower.state, flags.metrics_port, flags.metrics_address or LOOPBACK)
        except OSError as error:  # another program took the port since it was checked
            say(f"warning: --metrics_port {flags.metrics_port}: {error.strerror}; the run has no metrics there")
    owner, report = os.getppid(), None
    while os.getppid() == owner:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            with contextlib.suppress(ValueError):
                report = json.loads(sys.stdin.readline())
            break
        follower.poll()
    threading.Timer(CLOSE_S, os._exit, [0]).start()  # a disk or a receiver may not answer
    if server is not None:
        server.shutdown()
        server.server_close()  # the next start may need the port at once
    follower.end(report)
    senders.close(CLOSE_S)


if __name__ == "__main__":
    for number in _IGNORED:  # launchers send these to all processes; this one ends after its owner
        signal.signal(number, signal.SIG_IGN)
    follow(json.loads(sys.stdin.readline()))
    os._exit(0)  # a thread may wait for a receiver
