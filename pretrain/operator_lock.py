"""torch's lock around compiled operators, held by a process instead of by the existence of a file.

Each start of a run loads DeepSpeed's operators under a lock file (torch/utils/file_baton.py, 2.13). Where a run is
killed at that moment the file stays, and every later start waits for ever. tests/test_operator_lock.py fails on the day
that upstream mends it.
"""

import contextlib
import fcntl
import os
import time

import torch.utils.cpp_extension
from torch.utils.file_baton import FileBaton


class _ProcessBaton(FileBaton):
    """The same file, with a lock on it that ends with the process. To those who know only the file it is taken too."""

    def try_acquire(self) -> bool:
        while True:
            descriptor = os.open(self.lock_file_path, os.O_CREAT | os.O_RDWR, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(self.lock_file_path).st_ino == os.fstat(descriptor).st_ino:
                    self._descriptor = descriptor
                    return True
            except BlockingIOError:
                os.close(descriptor)
                return False
            except FileNotFoundError:
                pass
            os.close(descriptor)  # whoever had it has removed it meanwhile

    def wait(self) -> None:
        while not self.try_acquire():
            time.sleep(self.wait_seconds)
        self.release()

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # a program without our lock made the file and has removed it
            os.remove(self.lock_file_path)
        os.close(self._descriptor)


def lock_operators_by_process() -> None:
    """To be called before DeepSpeed loads an operator."""
    torch.utils.cpp_extension.FileBaton = _ProcessBaton  # type: ignore[misc]
