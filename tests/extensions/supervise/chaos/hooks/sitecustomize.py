"""Faults inside the ranks of a chaos run. Python imports this module when a process starts (see the module `site`).

../__main__.py puts this folder on PYTHONPATH, and sets DS_PRETRAIN_CHAOS to a folder with instructions:

    bad_steps.json   list of [step, data-parallel rank]: the loss of this step is NaN
    disk_full        while this file exists, checkpoint writes fail with ENOSPC
    cut_link.PID     the process shuts down its TCP connections, and removes this file

Without the variable this module does nothing. It imports nothing of the package, because it runs in every Python
process of the run; it patches a module after the process itself has imported it.
"""

import contextlib
import errno
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

VARIABLE = "DS_PRETRAIN_CHAOS"
_POLL_S = 0.1


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    """Import hook that calls a function with a module after the module has been executed."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.pop(name, None)  # removed, so that the search below does not find this hook again
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                patch(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _patch_step_loop(folder: str, step_loop: Any) -> None:
    """Make the loss of bad steps NaN, and start the thread that cuts links."""
    from pretrain.engine import steps  # imports torch: not at the start of every process

    with open(os.path.join(folder, "bad_steps.json"), encoding="utf-8") as file:
        bad_steps = dict(json.load(file))
    train_batch = step_loop.train_batch

    def train_batch_with_bad_steps(engine: Any, micro_batches: list[Any]) -> Any:
        bad_rank = bad_steps.get(engine.global_steps + 1)
        if bad_rank is not None and bad_rank % steps.data_parallel_size(engine) == steps.data_parallel_rank(engine):
            tokens, (labels, weights) = micro_batches[0]
            micro_batches = [(tokens, (labels, weights * float("nan"))), *micro_batches[1:]]
        return train_batch(engine, micro_batches)

    step_loop.train_batch = train_batch_with_bad_steps
    threading.Thread(target=_cut_links_on_request, args=(folder,), name="chaos", daemon=True).start()


def _cut_links_on_request(folder: str) -> None:
    request = os.path.join(folder, f"cut_link.{os.getpid()}")
    while True:
        time.sleep(_POLL_S)
        if os.path.exists(request):
            os.unlink(request)
            for descriptor in os.listdir("/proc/self/fd"):
                _shut_down(int(descriptor))


def _shut_down(descriptor: int) -> None:
    """Shut down the TCP connection of a file descriptor; leave other descriptors alone, such as listening sockets."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=os.dup(descriptor))
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()  # OSError: not connected
                connection.shutdown(socket.SHUT_RDWR)


class _FullDisk:
    """The module `os` with a `write` that fails while the file `disk_full` exists, after a part of the bytes."""

    def __init__(self, folder: str) -> None:
        self._request = os.path.join(folder, "disk_full")

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: Any) -> int:
        if not os.path.exists(self._request):
            return os.write(descriptor, data)
        if len(data) > 1 and os.fstat(descriptor).st_size == 0:
            return os.write(descriptor, data[:len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _patch_files(folder: str, files: Any) -> None:
    files.os = _FullDisk(folder)


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    sys.meta_path.insert(0, _PatchAfterImport({
        "pretrain.step_loop": partial(_patch_step_loop, os.environ[VARIABLE]),
        "pretrain.checkpoint.format.hashed_files": partial(_patch_files, os.environ[VARIABLE])}))
