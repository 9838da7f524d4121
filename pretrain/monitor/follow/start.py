"""Start the process that follows a run (`follower.py`), and report to it how the run ends."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.child import child_command
from pretrain.cli import say
from pretrain.config.flags.arguments import FLAGS, NOTIFICATIONS, RunArguments
from pretrain.config.flags.receivers import FOLLOWED, check_port, check_receivers, notifies, variable_names
from pretrain.distributed.process import ROOT
from pretrain.errors import CRASHED, INTERRUPTED, ConfigError, printable, shorten
from pretrain.remote import without_credentials

FOLLOWER_MODULE = "pretrain.monitor.follow.follower"
CLOSE_S = 5.0  # longest time for the last messages, by which a dead receiver delays the exit
SUPERVISOR, LAUNCHER, RANK_0 = "the supervisor", "ds-pretrain", "rank 0"
FILES = ("metrics.jsonl", "events.jsonl", "restarts.jsonl")
_LONGEST_END_S = 20.0  # CLOSE_S and the start of the follower, on a busy machine


@contextlib.contextmanager
def followed(args: RunArguments | None, owner: str, *, active: bool = True) -> Iterator[Callable[[int], None]]:
    """Let a process follow the run while the context is open, if the flags ask for one and nobody has started it.

    Yields a function that reports the exit code of the run. This process and its children get no URL of a receiver.
    Raises ConfigError if a receiver or the port cannot be used.
    """
    follower, end = None, {"exit_code": CRASHED, "reason": ""}
    starts = active and not os.environ.get(FOLLOWED) and args is not None and (notifies(args) or args.metrics_port)
    if args is not None and starts:
        check_receivers(args)
        check_port(args)
        follower = _start(args, owner)
        os.environ[FOLLOWED] = "1"
    hidden = {name: os.environ.pop(name) for name in variable_names(args) if name in os.environ} if args else {}
    try:
        yield lambda code: end.update(exit_code=code)
    except BaseException as error:
        others = INTERRUPTED if isinstance(error, KeyboardInterrupt) else CRASHED
        code = error.exit_code if isinstance(error, ConfigError) else others
        end = {"exit_code": code, "reason": f"{type(error).__name__}: {error}"}
        raise
    finally:
        os.environ.update(hidden)
        if starts:
            del os.environ[FOLLOWED]
        if follower is not None:
            reason = shorten(without_credentials(printable(str(end["reason"]))))
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the follower has ended, or is stopped
                follower.communicate(json.dumps({**end, "reason": reason}) + "\n", timeout=_LONGEST_END_S)


def _start(args: RunArguments, owner: str) -> "subprocess.Popen[str] | None":
    run = Path(args.save).absolute()
    flags = {name: getattr(args, name) for name, flag in FLAGS.items() if flag.group is NOTIFICATIONS}
    try:
        request = {"args": {**flags, "save": str(run)}, "owner": owner, "directory": os.getcwd(),
                   "sizes": {name: (run / name).stat().st_size if (run / name).is_file() else 0 for name in FILES}}
        process = subprocess.Popen(child_command(FOLLOWER_MODULE), cwd=ROOT, text=True, start_new_session=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    except OSError as error:  # for example no more processes allowed, or a run folder that cannot be read
        say(f"warning: nobody hears of this run: {error}")
        return None
    return process
