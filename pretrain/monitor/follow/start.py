"""Start the process that follows a run (`follower.py`), and report to it how the run ends."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.receivers import (
    FOLLOWED,
    check_port,
    check_receivers,
    kinds_to_send,
    notifies,
    socket_address,
    variable_names,
)
from pretrain.distributed.process import ROOT, package_environment
from pretrain.errors import REJECTED, ConfigError, printable, shorten
from pretrain.remote import without_credentials

FOLLOWER_MODULE = "pretrain.monitor.follow.follower"
CLOSE_S = 5.0  # longest time for the last messages, by which a dead receiver delays the exit
SUPERVISOR, LAUNCHER, RANK_0 = "the supervisor", "ds-pretrain", "rank 0"
FILES = ("metrics.jsonl", "events.jsonl", "restarts.jsonl")
_SILENCE_MINUTES = 30.0
_START_S = 20.0  # time that the follower may need to start, on a busy machine


@dataclass(frozen=True)
class FollowRequest:
    """What the follower needs. The URLs are not here: it reads them from its environment."""

    run: str
    sizes: dict[str, int]  # file of FILES -> bytes before this start
    owner: str  # SUPERVISOR, LAUNCHER or RANK_0
    variables: list[str]  # names of environment variables with URLs
    command: str | None
    directory: str  # working directory of the command
    kinds: list[str]
    silence_s: float
    port: int | None
    address: str


class Follower:
    """The follower of this process's run; or nothing, if the flags ask for none."""

    def __init__(self, process: "subprocess.Popen[str] | None" = None) -> None:
        self._process, self._started = process, time.monotonic()

    def report(self, reason: str, exit_code: int | None = None) -> None:
        """Report how the run ended, if its events do not: only the first report counts."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            line = shorten(without_credentials(printable(reason)))
            with contextlib.suppress(OSError):  # the follower has ended
                self._process.stdin.write(json.dumps({"reason": line, "exit_code": exit_code}) + "\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """Wait until the last messages are sent, or have failed."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(CLOSE_S + 1, self._started + _START_S - time.monotonic()))


@contextlib.contextmanager
def followed(args: RunArguments | None, owner: str, *, active: bool = True) -> Iterator[Follower]:
    """Let a process follow the run while the context is open, if the flags ask for one and nobody has started it.

    Raises ConfigError if a receiver or the port cannot be used.
    """
    if args is None or not active or os.environ.get(FOLLOWED) or not (notifies(args) or args.metrics_port):
        yield Follower()
        return
    check_receivers(args)
    check_port(args)
    follower = Follower(_start(args, owner))
    os.environ[FOLLOWED] = "1"  # the ranks start none, and get no URL
    hidden = {name: os.environ.pop(name) for name in variable_names(args.notify) if name in os.environ}
    try:
        yield follower
    except ConfigError as error:
        follower.report(str(error), REJECTED)
        raise
    except BaseException as error:
        follower.report(f"{type(error).__name__}: {error}")
        raise
    finally:
        del os.environ[FOLLOWED]
        os.environ.update(hidden)
        follower.close()


def _start(args: RunArguments, owner: str) -> "subprocess.Popen[str] | None":
    run = Path(args.save).absolute()
    request = FollowRequest(
        run=str(run), owner=owner,
        sizes={name: (run / name).stat().st_size if (run / name).is_file() else 0 for name in FILES},
        variables=variable_names(args.notify),
        command=args.notify_command, directory=os.getcwd(), kinds=kinds_to_send(args),
        silence_s=(args.notify_silence or _SILENCE_MINUTES) * 60, port=args.metrics_port,
        address=socket_address(args)[1] if args.metrics_port else "")
    try:
        process = subprocess.Popen([sys.executable, "-m", FOLLOWER_MODULE], cwd=ROOT, text=True, start_new_session=True,
                                   env=package_environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(request)) + "\n")
        process.stdin.flush()
    except OSError as error:  # for example no more processes allowed
        print(f"warning: nobody hears of this run: {error}", file=sys.stderr, flush=True)
        return None
    return process


def without_receivers(environ: Mapping[str, str], args: RunArguments) -> dict[str, str]:
    """Return an environment without the variables that hold URLs of --notify: for records, and for other hosts."""
    names = variable_names(args.notify)
    return {name: value for name, value in environ.items() if name not in names}
