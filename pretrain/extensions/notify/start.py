"""Start the process that follows a run (`follower.py`), and report to it how the run ends."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from pretrain.child import child_command
from pretrain.cli import say
from pretrain.config.flags.arguments import RunArguments
from pretrain.distributed.process import ROOT
from pretrain.errors import CRASHED, INTERRUPTED, ConfigError, printable, shorten
from pretrain.extensions.notify.extension import Notify
from pretrain.extensions.notify.receivers import check_port, check_receivers
from pretrain.remote import without_credentials

CLOSE_S = 5.0  # longest time for the last messages, by which a dead receiver delays the exit
FILES = ("metrics.jsonl", "events.jsonl", "restarts.jsonl")
_LONGEST_END_S = 20.0  # CLOSE_S and the start of the follower, on a busy machine


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
    except OSError as error:  # for example no more processes allowed, or a run folder that cannot be read
        say(f"warning: nobody hears of this run: {error}")
        return None
    return process
