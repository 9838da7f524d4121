"""Threads for requests to a store, which never delay the exit of the process."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class DaemonThreads:
    """Runs functions in threads, like ThreadPoolExecutor, whose threads the end of a process waits for.

    A thread may wait for a store that does not answer. `initializer` is called once in each thread.
    """

    def __init__(self, max_threads: int, *, name: str, initializer: Callable[[], object] = lambda: None) -> None:
        self._max_threads, self._name, self._initializer = max_threads, name, initializer
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock, self._numbers, self._started, self._unfinished = threading.Lock(), itertools.count(), 0, 0

    def submit(self, function: Callable[..., _T], *args: Any) -> "Future[_T]":
        """Call `function(*args)` in a thread, in the order of the calls of `submit`."""
        future: Future[_T] = Future()
        with self._lock:
            self._unfinished += 1
            if self._unfinished > self._started and self._started < self._max_threads:
                self._started += 1
                threading.Thread(target=self._run, daemon=True, name=f"{self._name}_{next(self._numbers)}").start()
        self._queue.put((future, lambda: function(*args)))
        return future

    def shutdown(self, *, wait: bool = False, cancel_futures: bool = True) -> None:
        """Cancel the functions that have not begun, and let the threads end. Does not wait for them."""
        del wait, cancel_futures
        with self._lock:
            started, self._started, self._max_threads = self._started, 0, 0
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in range(started):
            self._queue.put(None)

    def _run(self) -> None:
        self._initializer()
        while (item := self._queue.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            with self._lock:
                self._unfinished -= 1
            del item, future, call  # hold no result while waiting


def map_in_threads(function: Callable[[_Item], _T], items: Iterable[_Item]) -> list[_T]:
    """Return the results of a function that waits for the network, in the order of the items."""
    threads = DaemonThreads(16, name="store")
    try:
        return [future.result() for future in [threads.submit(function, item) for item in items]]
    finally:
        threads.shutdown()
