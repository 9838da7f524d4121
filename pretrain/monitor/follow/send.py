"""Messages to receivers: the first one of a kind at once, later ones in groups, in threads that nobody waits for."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from pretrain.daemon_threads import DaemonThreads
from pretrain.monitor.follow.messages import Message

GROUPED_S = 600.0  # after a message, others of its kind are counted for this time
_COMMAND_S = 30.0
_RETRY_S = 30.0


@dataclass
class _Group:
    ends: float
    began: float
    count: int = 0
    last: Message | None = None


class Grouping:
    """Lets the first message of each kind through, and groups the others of the next minutes. Times are seconds."""

    def __init__(self, seconds: float = GROUPED_S) -> None:
        self._seconds = seconds
        self._groups: dict[str, _Group] = {}

    def add(self, message: Message, now: float) -> list[Message]:
        """Return what to send now: this message, or nothing if it was added to a group."""
        group = self._groups.get(message.kind)
        if group is None:
            self._groups[message.kind] = _Group(now + self._seconds, now)
            return [message]
        group.count, group.last = group.count + 1, message
        return []

    def take_due(self, now: float, *, everything: bool = False) -> list[Message]:
        """Return a message for each group whose time is over; with `everything`, for all groups."""
        found = []
        for kind, group in list(self._groups.items()):
            if not everything and now < group.ends:
                continue
            del self._groups[kind]
            if group.last is not None:
                is_single = group.count == 1
                minutes = max((now - group.began) / 60, 1)
                found.append(group.last if is_single else group.last.as_group(group.count, minutes))
                self._groups[kind] = _Group(now + self._seconds, now)
        return found


class Senders:
    """Sends messages to all receivers. A receiver that fails costs one warning, and no other receiver waits for it.

    Args:
        receivers: (name, function that sends a message and returns whether the receiver accepted it).
        warn: prints a line.
    """

    def __init__(self, receivers: Sequence[tuple[str, Callable[[Message], bool]]], warn: Callable[[str], None]) -> None:
        self._receivers = [(name, send, DaemonThreads(1, name="notify")) for name, send in receivers]
        self._closing, self._warned, self._warn = threading.Event(), set[str](), warn
        self._futures: list[Future[Any]] = []

    def send(self, message: Message) -> None:
        """Begin to send a message."""
        self._futures = [future for future in self._futures if not future.done()]
        self._futures += [threads.submit(self._deliver, name, send, message)
                          for name, send, threads in self._receivers]

    def close(self, seconds: float) -> None:
        """Wait until all messages are sent, at most for some seconds. Failed ones are not repeated any more."""
        self._closing.set()
        wait(self._futures, timeout=seconds)

    def _deliver(self, name: str, send: Callable[[Message], bool], message: Message) -> None:
        """Send a message, once more after a while if the receiver did not accept it."""
        for is_last in (self._closing.is_set(), True):
            with contextlib.suppress(Exception):  # of a service's client: its text may hold the URL
                if send(message):
                    return
            if is_last or self._closing.wait(_RETRY_S):
                break
        if name not in self._warned:
            self._warned.add(name)
            self._warn(f"warning: {name}: a message about the run was not accepted; the run continues, and later "
                       "failures are not reported")


def apprise_sender(urls: Sequence[str]) -> Callable[[Message], bool]:
    """Return a function that sends to URLs of apprise, which has time-outs of 4 s for connecting and for the answer."""
    import apprise

    receiver = apprise.Apprise(asset=apprise.AppriseAsset(app_id="ds-pretrain", async_mode=False))
    receiver.add(list(urls))
    return lambda message: bool(receiver.notify(title=message.title, body=message.body, notify_type=message.severity,
                                                body_format="text"))


def command_sender(command: str, directory: str) -> Callable[[Message], bool]:
    """Return a function that gives a message to a shell command, which is killed after 30 s."""
    def send(message: Message) -> bool:
        environ = {**os.environ, "DS_PRETRAIN_EVENT": message.kind, "DS_PRETRAIN_RUN": str(message.run),
                   "DS_PRETRAIN_STEP": str(message.step)}
        with subprocess.Popen(command, shell=True, cwd=directory, env=environ, text=True, start_new_session=True,
                              stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            try:
                child.communicate(f"{message.title}\n{message.body}\n", timeout=_COMMAND_S)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                with contextlib.suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
            return child.wait() == 0

    return send


def print_warning(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"ds-pretrain: {line}", file=sys.stderr, flush=True)


def now() -> float:
    """Return the time of a clock that stands still while the machine is suspended."""
    return time.monotonic()
