"""Ways in which a rank of forked.py hangs, or is slow, at a chosen place."""

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain import step_loop as loop

AT_CALL = 3


def hang(how: str, mark: Path) -> None:
    """Make this rank hang or sleep. Before it hangs, it writes the time to `mark`.

    `how`: step_stopped, save_stopped: SIGSTOP. data_blocked: waits in C code and holds Python's lock. raises: raises an
    exception. slow:SECONDS: sleeps in the first step, in each batch of an evaluation, and in each save.
    """
    if how == "step_stopped":
        _before("train_batch", lambda: _stop(mark), at_call=AT_CALL)
    elif how == "save_stopped":
        _before_method(loop.Saver, "save", lambda: _stop(mark), at_call=1)
    elif how == "data_blocked":
        _before_method(loop.Loader, "step", lambda: _block(mark), at_call=AT_CALL)
    elif how == "raises":
        _before("train_batch", lambda: _raise(mark), at_call=AT_CALL)
    elif how.startswith("slow:"):
        seconds = float(how.partition(":")[2])
        _before("train_batch", lambda: time.sleep(seconds), at_call=1)
        _before("eval_batch", lambda: time.sleep(seconds / 3))
        _before_method(loop.Saver, "save", lambda: time.sleep(seconds))


def _stop(mark: Path) -> None:
    mark.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(mark: Path) -> None:
    mark.write_text(str(time.time()))
    raise ValueError("the first cause")


def _block(mark: Path) -> None:
    mark.write_text(str(time.time()))
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _before(name: str, action: Callable[[], None], *, at_call: int = 0) -> None:
    """Call `action` before each call of a function of the step loop, or only before call `at_call`."""
    setattr(loop, name, _wrapped(getattr(loop, name), action, at_call))


def _before_method(owner: Any, name: str, action: Callable[[], None], *, at_call: int = 0) -> None:
    setattr(owner, name, _wrapped(getattr(owner, name), action, at_call))


def _wrapped(function: Callable[..., Any], action: Callable[[], None], at_call: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*args: Any, **keywords: Any) -> Any:
        if at_call in (0, next(calls)):
            action()
        return function(*args, **keywords)

    return call
