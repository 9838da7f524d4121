"""The files STOP, SAVE and PROFILE in a run folder: a user stops the run, saves now, or profiles some steps."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from pretrain.config.profiles import DEFAULT_PROFILE_STEPS, MOST_STEPS
from pretrain.paths import PROFILE_FILE, SAVE_FILE, STOP_FILE
from pretrain.stored_json import read_text


class ControlFiles:
    """Looks for these files in the run folder, on rank 0. A SAVE file is removed after the commit of its checkpoint.

    Args:
        run: run folder.
        committed_step: returns the step of the newest checkpoint that this process has committed.
    """

    def __init__(self, run: Path, committed_step: Callable[[], int]) -> None:
        self.stop_path, self.save_path, self.profile_path = run / STOP_FILE, run / SAVE_FILE, run / PROFILE_FILE
        self._committed_step = committed_step
        self._profile_remains = False  # PROFILE cannot be removed: it has requested a profile once
        self._seen = 0  # modification time of the SAVE file that was requested last, in ns; 0: none yet
        self._saved_at: int | None = None  # step of the save for this file; None: there is no unfinished save

    def stop_requested(self) -> bool:
        return os.path.exists(self.stop_path)  # False after errors of a file server, which Path.exists raises

    def save_requested(self) -> bool:
        """Return whether there is a SAVE file that was not requested yet. If its save fails, `touch` requests another.
        """
        if self._saved_at is not None and self._committed_step() >= self._saved_at:
            self._saved_at = None
            if self._modified() == self._seen:
                self._remove()
        modified = self._modified()
        is_new = modified not in (0, self._seen)
        self._seen = modified or self._seen
        return is_new

    def save_begins(self, step: int) -> None:
        """Record that the requested checkpoint is saved after `step`."""
        self._saved_at = step

    def take_profile_steps(self) -> int:
        """Remove PROFILE if there is this file. Return the number of steps to profile, which may be in it; otherwise 0.
        """
        if self._profile_remains or not os.path.exists(self.profile_path):
            return 0
        text = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = read_text(self.profile_path)[:20].strip()
        try:
            self.profile_path.unlink()
        except OSError:
            self._profile_remains = True
        return min(max(int(text), 1), MOST_STEPS) if text.isdecimal() else DEFAULT_PROFILE_STEPS

    def close(self) -> None:
        """Remove SAVE: the last step of this process has been saved."""
        self._remove()

    def _modified(self) -> int:
        """Return the modification time of SAVE in ns; 0 if there is no such file."""
        with contextlib.suppress(OSError):
            return self.save_path.stat().st_mtime_ns
        return 0

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.save_path.unlink()
