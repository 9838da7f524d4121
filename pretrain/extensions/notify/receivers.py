"""Check who hears of a run, start the process that follows it, and send messages.

The first message of a kind is sent at once, later ones in groups, in threads that nobody waits for. URLs of receivers
hold secrets: they are read from environment variables, and only by the process that sends.
"""

import contextlib
import json
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pretrain.child import child_command
from pretrain.cli import OWNED, chosen, say
from pretrain.config.flags.arguments import RunArguments
from pretrain.daemon_threads import DaemonThreads
from pretrain.distributed.process import ROOT
from pretrain.distributed.world import world_from_environment
from pretrain.errors import CRASHED, INTERRUPTED, ConfigError, printable, require_package, shorten
from pretrain.extensions.notify.extension import KINDS, Notify
from pretrain.extensions.notify.messages import Message
from pretrain.remote import without_credentials

LOOPBACK = "127.0.0.1"
GROUPED_S = 600.0  # after a message, others of its kind are counted for this time
_COMMAND_S = "30"
_RETRY_S = 30.0

Send = Callable[[Message], bool]
"""Sends a message, and returns whether the receiver accepted it"""
CLOSE_S = 5.0  # longest time for the last messages, by which a dead receiver delays the exit
FILES = ("metrics.jsonl", "events.jsonl", "restarts.jsonl")
_LONGEST_END_S = 20.0  # CLOSE_S and the start of the follower, on a busy machine


def check_receivers(args: RunArguments) -> None:
    """Raise ConfigError for receivers and addresses that cannot be used, and for flags without an effect.

    URLs are read only where they are used: by the launcher, or without one by rank 0.
    """
    flags = args.of(Notify)
    for name, other, used in (("notify_on", "--notify or --notify_command", flags.has_receivers),
                              ("notify_silence", "--notify or --notify_command", flags.has_receivers),
                              ("metrics_address", "--metrics_port", flags.metrics_port)):
        if getattr(flags, name) is not None and not used:
            raise ConfigError(f"--{name}", problem=f"it has no effect without {other}", remedy=f"give {other}, too")
    kinds_to_send(flags)
    if os.environ.get(OWNED) or world_from_environment(os.environ).rank != 0:
        return
    read_urls(flags, os.environ)
    if flags.metrics_port is not None:
        require_package("prometheus_client", "--metrics_port", "metrics",
                        "the package prometheus-client is not installed")
        _socket_address(flags)


def kinds_to_send(flags: Notify) -> Sequence[str]:
    """Return the kinds of messages that --notify_on selects. Raises ConfigError for an unknown kind."""
    return chosen("--notify_on", flags.notify_on or [], KINDS) or KINDS


def read_urls(flags: Notify, environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return name of the variable -> the URLs that it holds. Raises ConfigError, which never has a part of a URL."""
    found: dict[str, list[str]] = {}
    for name in flags.variables:
        if not name.isidentifier():
            raise ConfigError("--notify", problem="it takes the name of an environment variable, not a URL, which "
                              "other users could read in the list of processes",
                              remedy="run `export NOTIFY_URL='...'` with the URL, and give --notify NOTIFY_URL")
        found[name] = environ.get(name, "").split()
        if not found[name]:
            raise ConfigError("--notify", problem=f"the environment variable {name} is empty or not set",
                              remedy=f"run `export {name}='...'` with a URL such as slack://... before this command")
    if found:
        require_package("apprise", "--notify", "notify")
        import apprise

        silence_apprise()
        for name, urls in found.items():
            if not all(apprise.Apprise.instantiate(url, suppress_exceptions=True) for url in urls):
                raise ConfigError("--notify", problem=f"the variable {name} holds no URL that apprise knows",
                                  remedy="it begins with the name of a service, such as slack://, mailto:// or "
                                  "json://; `apprise --details` lists them")
    return found


def silence_apprise() -> None:
    """Print nothing that apprise logs: its lines may hold the URL."""
    logger = logging.getLogger("apprise")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def check_port(flags: Notify) -> None:
    """Raise ConfigError if no server can listen on --metrics_port."""
    if flags.metrics_port is None:
        return
    family, place = _socket_address(flags)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
            probe.listen()
        except OSError as error:
            raise ConfigError("--metrics_port", problem=f"port {flags.metrics_port} of {place[0]} cannot be used: "
                              f"{error.strerror}", remedy="choose another port, or an address of this host as "
                              "--metrics_address") from None


def _socket_address(flags: Notify) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    address = flags.metrics_address or LOOPBACK
    try:
        family, _, _, _, place = socket.getaddrinfo(address, flags.metrics_port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a host name"
        raise ConfigError("--metrics_address", problem=f"{address!r} is no address: {reason}",
                          remedy="give an address of this host, or 0.0.0.0 or :: for all of them") from None
    return family, place


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
            with contextlib.suppress(Exception):  # raised by a service's client: its text may hold the URL
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


@contextlib.contextmanager
def followed(args: RunArguments, owner: str, *, active: bool = True) -> Iterator[Callable[[int], None]]:
    """Let a process follow the run while the context is open, if the flags ask for one and nobody has started it.

    Yields a function that reports the exit code of the run.
    Raises ConfigError if a receiver or the port cannot be used.
    """
    follower, flags, end = None, args.of(Notify), {"exit_code": CRASHED, "reason": ""}
    starts = active and (flags.has_receivers or flags.metrics_port)
    if starts:
        check_receivers(args)
        check_port(flags)
        follower = _start(Path(args.save).absolute(), flags, owner)
    try:
        yield lambda code: end.update(exit_code=code)
    except BaseException as error:
        others = INTERRUPTED if isinstance(error, KeyboardInterrupt) else CRASHED
        code = error.exit_code if isinstance(error, ConfigError) else others
        end = {"exit_code": code, "reason": f"{type(error).__name__}: {error}"}
        raise
    finally:
        if follower is not None:
            reason = shorten(without_credentials(printable(str(end["reason"]))))
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the follower has ended, or is stopped
                follower.communicate(json.dumps({**end, "reason": reason}) + "\n", timeout=_LONGEST_END_S)


def _start(run: Path, flags: Notify, owner: str) -> "subprocess.Popen[str] | None":
    try:
        request = {"run": str(run), "flags": asdict(flags), "owner": owner, "directory": os.getcwd(),
                   "sizes": {name: (run / name).stat().st_size if (run / name).is_file() else 0 for name in FILES}}
        process = subprocess.Popen(child_command("pretrain.extensions.notify.follower"), cwd=ROOT, text=True,
                                   start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    except OSError as error:  # no more processes are allowed, or the run folder cannot be read
        say(f"warning: nobody hears of this run: {error}")
        return None
    return process
