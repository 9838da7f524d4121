"""Messages to receivers: the first one of a kind at once, later ones in groups, in threads that nobody waits for."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from pretrain.cli import say
from pretrain.daemon_threads import DaemonThreads
from pretrain.extensions.notify.messages import Message

GROUPED_S = 600.0  # after a message, others of its kind are counted for this time
_COMMAND_S = "30"
_RETRY_S = 30.0

Send = Callable[[Message], bool]
"""Sends a message, and returns whether the receiver accepted it"""


class Grouping:
    """Lets the first message of each kind through, and groups the others of the next minutes. Times are seconds."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}  # kind -> end of its group
        self._held: dict[str, tuple[int, Message]] = {}  # kind -> number of its messages in the group, the last one

    def add(self, message: Message, now: float) -> list[Message]:
        """Return what to send now: this message, or nothing if it was added to a group."""
        if message.kind in self._ends:
            self._held[message.kind] = self._held.get(message.kind, (0, message))[0] + 1, message
            return []
        self._ends[message.kind] = now + GROUPED_S
        return [message]

    def take_due(self, now: float, *, everything: bool = False) -> list[Message]:
        """Return a message for each group whose time is over; with `everything`, for all groups."""
        found = []
        for kind in [kind for kind, ends in self._ends.items() if everything or now >= ends]:
            del self._ends[kind]
            if kind in self._held:
                count, last = self._held.pop(kind)
                found.append(last if count == 1 else replace(
                    last, headline=f"{count} more: {kind}", lines=(f"The last: {last.headline}", *last.lines)))
                self._ends[kind] = now + GROUPED_S
        return found


class Senders:
    """Sends each message to all receivers, each in a thread of its own: none waits for another one.

    A receiver that does not accept a message is one warning.
    """

    def __init__(self, receivers: Mapping[str, Send]) -> None:
        self._receivers = [(name, send, DaemonThreads(1, name="notify")) for name, send in receivers.items()]
        self._closing, self._warned, self._futures = threading.Event(), set[str](), list[Future[Any]]()

    def send(self, message: Message) -> None:
        """Begin to send a message."""
        self._futures = [future for future in self._futures if not future.done()]
        self._futures += [threads.submit(self._deliver, name, send, message)
                          for name, send, threads in self._receivers]

    def close(self, seconds: float) -> None:
        """Wait until all messages are sent, at most for some seconds. Failed ones are not repeated any more."""
        self._closing.set()
        wait(self._futures, timeout=seconds)

    def _deliver(self, name: str, send: Send, message: Message) -> None:
        """Send a message, once more after a while if the receiver did not accept it."""
        for pause_s in (0 if self._closing.is_set() else _RETRY_S, 0):
            with contextlib.suppress(Exception):  # of a service's client: its text may hold the URL
                if send(message):
                    return
            if pause_s == 0 or self._closing.wait(pause_s):
                break
        if name not in self._warned:
            self._warned.add(name)
            with contextlib.suppress(OSError):
                say(f"warning: {name}: a message about the run was not accepted; the run continues, and later "
                    "failures are not reported")


def apprise_sender(urls: Sequence[str]) -> Send:
    """Return a function that sends to URLs of apprise, which has time-outs of 4 s for connecting and for the answer."""
    import apprise

    receiver = apprise.Apprise(asset=apprise.AppriseAsset(app_id="ds-pretrain", async_mode=False))
    receiver.add(list(urls))
    return lambda message: bool(receiver.notify(title=message.title, body=message.body, notify_type=message.severity,
                                                body_format="text"))


def command_sender(command: str, directory: str) -> Send:
    """Return a function that gives a message to a shell command, which is killed after 30 s, even without this process.
    """
    def send(message: Message) -> bool:
        environ = {**os.environ, "DS_PRETRAIN_EVENT": message.kind, "DS_PRETRAIN_RUN": str(message.run),
                   "DS_PRETRAIN_STEP": str(message.step)}
        return subprocess.run(["timeout", "-s", "KILL", _COMMAND_S, "sh", "-c", command], text=True, cwd=directory,
                              input=f"{message.title}\n{message.body}\n", env=environ, start_new_session=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    return send
