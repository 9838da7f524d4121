"""State that a rank records for its watcher, in memory that both share (see watchdog.py and watcher.py)."""

import signal
import struct
from typing import NamedTuple

PHASES = ("connect", "checkpoint", "build", "load", "trial", "data", "step", "rollback", "eval", "save", "end")
FLAGS = ("--step_timeout", "--first_step_timeout", "--save_timeout")
STATE = struct.Struct("6q")  # the shared memory: the fields of `State`
NOTE = struct.Struct("960s")  # what the data waits for, as UTF-8; empty: for nothing
NOTE_OFFSET = 64  # after the state
BEATS = struct.Struct("q")  # the second field
STACKS_SIGNAL = signal.SIGRTMAX - 2  # real-time signals are free for programs; SIGUSR1 and SIGTERM ask for a save


class State(NamedTuple):
    """Phase, step and counts that a rank has recorded last."""

    entered: int  # number of phases that the rank has entered so far
    beats: int
    step: int
    phase: int  # index in PHASES
    limit_ms: int
    flag: int  # index in FLAGS
