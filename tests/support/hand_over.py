"""Hand a program over to a warm process. warm_starts.py copies this file to where Python imports it at its start."""

import os
import signal
import sys
from collections.abc import Sequence

VARIABLE = "TEST_WARM_SOCKET"
_PROGRAMS = ("/bin/ds-pretrain", "/pretrain/__main__.py", "/pretrain/train.py")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def hand_over() -> None:
    """Hand over this process if it has started a program of this package."""
    words = sys.orig_argv[1:]
    program = words[words[:1] == ["-u"]:][:1]
    file = os.path.realpath(program[0]) if program and not program[0].startswith("-") else ""
    if file.endswith(_PROGRAMS) or "/tools/" in file:
        run_instead(os.environ[VARIABLE], words)


def run_instead(path: str, command: Sequence[str]) -> None:
    """Run a command in the warm process instead of in this process, which passes signals on, and ends as it does.

    Returns if there is no warm process, or if it has imported its modules in another environment.
    """
    from pretrain.cluster.warm_process import start

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until there is a process that gets them
    try:
        child = start(path, command, cwd=os.getcwd(), environ=os.environ, same_imports=True)
    except OSError:
        child = None
    if child is not None:
        pid = child.pid
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if child is None:
        return
    code = child.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
