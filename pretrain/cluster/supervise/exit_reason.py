"""Classify how a start ended, from its launcher's exit code and from what the run wrote.

A launcher hides the ranks' exit codes. `deepspeed` exits with 247 for a killed rank, with 1 when it is asked to stop,
with the largest code of its hosts under pdsh, and with 0 when its own child process was killed. So the run's own files
(events.jsonl, checkpoints) take precedence over the launcher's code.
"""

import contextlib
import signal

from pretrain.cluster.supervise.progress import RunProgress
from pretrain.errors import CRASHED, FINISHED, GUARD, HANG, REJECTED, STOPPED

_REASONS = {REJECTED: "rejected", STOPPED: "stopped", GUARD: "stopped by the bad-step guard", HANG: "hang"}


def classify_exit(code: int, progress: RunProgress, *, last_step: int | None) -> tuple[int, str]:
    """Return (exit code as train.py would have given it, reason) for a launcher's exit code.

    `last_step`: step at which the run is complete; None: unknown.
    """
    complete = last_step is not None and progress.kept_step >= last_step
    stop = progress.stop
    if stop is not None and (complete or stop["reason"] in ("finished", "--exit_step")):
        return FINISHED, "finished"
    if code == 0 and complete:
        return FINISHED, "finished"
    if code in (REJECTED, GUARD, HANG):
        return code, _REASONS[code]
    if stop is not None:
        return STOPPED, f"saved on {stop['reason']}"
    if code == STOPPED:
        return STOPPED, _REASONS[STOPPED]
    if code == 0:
        return CRASHED, "crash: the launcher exited with 0, but the run has not finished"
    return code, f"crash: {_describe(code)}"


def _describe(code: int) -> str:
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 256 - code if code > 224 else 0
    if code == 255:
        return "exit code 255, which ssh uses for a lost connection"
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} (exit code {code})"
    return f"exit code {code}"


def shell_exit_code(code: int | None) -> int:
    """Convert an exit code of subprocess to the shell's convention. None (not started) becomes 1."""
    return CRASHED if code is None else 128 - code if code < 0 else code
