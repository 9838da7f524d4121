"""Find out how a start of the run ended, from the launcher's exit code and from the files of the run.

A launcher hides the exit codes of the ranks. `deepspeed` exits with 247 if a rank was killed, with 1 if `deepspeed`
itself gets a signal, with the largest code of all hosts under pdsh, and with 0 if its child process was killed.
Therefore the files of the run (events.jsonl, checkpoints) take precedence over the launcher's exit code.
"""

import contextlib
import signal

from pretrain.cluster.supervise.progress import RunProgress
from pretrain.errors import CRASHED, FINISHED, GUARD, HANG, REJECTED, STOPPED

_REASONS = {REJECTED: "rejected", STOPPED: "stopped", GUARD: "stopped by the bad-step guard", HANG: "hang"}


def classify_exit(code: int, progress: RunProgress, *, last_step: int | None) -> tuple[int, str]:
    """Return (exit code, reason). The exit code is the one that train.py would have returned.

    Args:
        code: exit code of the launcher.
        progress: rows and checkpoints that this start has added to the run folder.
        last_step: step at which the run is complete; None: unknown.
    """
    complete = last_step is not None and progress.kept_step >= last_step
    stop = progress.stop
    if stop is not None and (complete or stop["reason"] in ("finished", "early_stop", "--exit_step")):
        return FINISHED, "finished"
    if code == 0 and complete:
        return FINISHED, "finished"
    if stop is not None and stop.get("exit_code") == GUARD:
        return GUARD, _REASONS[GUARD]
    if code in (REJECTED, GUARD):
        return code, _REASONS[code]
    if progress.hang is not None and code not in (FINISHED, STOPPED):  # 247 and 137: the stopped rank was killed
        return HANG, f"hang: {progress.hang['reason']}"
    if code == HANG:
        return code, _REASONS[code]
    if stop is not None:
        return STOPPED, f"saved on {stop['reason']}"
    if code == STOPPED:
        return STOPPED, _REASONS[STOPPED]
    if code == 0:
        return CRASHED, "crash: the launcher exited with 0, but the run has not finished"
    return code, f"crash: {_describe_exit_code(code)}"


def _describe_exit_code(code: int) -> str:
    """Return the signal or the exit code as text. -N, 128 + N and 256 - N all mean that signal N ended a process."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 256 - code if code > 224 else 0
    if code == 255:
        return "exit code 255, which ssh uses for a lost connection"
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} (exit code {code})"
    return f"exit code {code}"


def shell_exit_code(code: int | None) -> int:
    """Convert an exit code of subprocess to the shell's convention. None (not started) becomes 1."""
    return CRASHED if code is None else 128 - code if code < 0 else code
