"""The process that follows a run (`followed` in receivers.py starts it), and serves its metrics for Prometheus.

    python pretrain/child.py pretrain.extensions.notify.follower     (first line of stdin: a request, as JSON)

The pipe is also how its owner reports the end of the run: a line of JSON, or none if the owner was killed.

The names and help texts of metrics are those of the tables in monitor/rows.py, with the prefix `ds_pretrain_`. A value
that is null, such as a NaN, is left out.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.cli import say
from pretrain.errors import format_number
from pretrain.extension import LAUNCHER, RANK_0
from pretrain.extensions.notify.extension import Notify
from pretrain.extensions.notify.messages import Message, RunState
from pretrain.extensions.notify.receivers import (
    CLOSE_S,
    FILES,
    LOOPBACK,
    Grouping,
    Send,
    Senders,
    apprise_sender,
    command_sender,
    kinds_to_send,
    read_urls,
    silence_apprise,
)
from pretrain.monitor.read_run_folder import Tail, is_number
from pretrain.monitor.rows import EVALUATION_ROW, OPTIONAL_KEYS, TRAINING_ROW

_PREFIX = "ds_pretrain_"
_EVALUATED = ("eval_loss", "eval_ppl")
_KEYS = {**TRAINING_ROW, **OPTIONAL_KEYS}
# name -> (unit, help text)
_METRICS = {
    **_KEYS, **{key: EVALUATION_ROW[key] for key in _EVALUATED},
    "train_steps": ("steps", "of the complete run"),
    "events": ("rows", "of events.jsonl, by event, since the process that follows the run was started"),
    "run_info": ("", "1; the labels describe the run"),
}
_POLL_S = 0.5
_SILENCE_MINUTES = 30.0
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Collector:
    """Gives the values to prometheus-client when they are asked for."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that have a value now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state
        evaluations = [(split, row) for split, row in state.evaluations.items()]
        samples: dict[str, list[tuple[dict[str, str], Any]]] = {
            **{key: [({}, state.row.get(key))] for key in _KEYS}, "train_steps": [({}, state.train_steps)],
            **{key: [({"split": split}, row.get(key)) for split, row in evaluations] for key in _EVALUATED},
            "events": [({"event": event}, count) for event, count in state.events.items()],
            "run_info": [(state.info, 1)] if state.info else []}
        for name, found in samples.items():
            if found := [(labels, value) for labels, value in found if is_number(value)]:
                unit, text = _METRICS[name]
                kind = CounterMetricFamily if name == "events" else GaugeMetricFamily
                family = kind(_PREFIX + name, f"{text} ({unit})" if unit else text, labels=list(found[0][0]))
                for labels, value in found:
                    family.add_metric(list(labels.values()), value)
                yield family


def metric_names() -> set[str]:
    """Return the names of all metrics, as Prometheus has them."""
    return {f"{_PREFIX}{name}{'_total' if name == 'events' else ''}" for name in _METRICS}


def serve(state: RunState, port: int, address: str) -> Any:
    """Serve the metrics in daemon threads. Returns the server. Raises OSError."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(Collector(state))
    return start_http_server(port, addr=address, registry=registry)[0]


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
        starts_again = self.owner not in (LAUNCHER, RANK_0)
        if starts_again and event == "stop":
            return  # restarts.jsonl has how starts end
        if not starts_again:
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
