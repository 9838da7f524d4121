"""The .bin file of a data set in an object store, read in pages through a cache on the local disk; waits for it."""

import functools
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt

from pretrain.callback import Callback, Run
from pretrain.cli import say
from pretrain.daemon_threads import DaemonThreads
from pretrain.errors import ConfigError
from pretrain.extensions.object_stores.page_cache import PAGE_BYTES, PageCache
from pretrain.extensions.object_stores.remote_file import RemoteFile

_REQUESTS = 32  # at the same time, in one process
_LARGEST_REQUEST, _AHEAD = 16, 4  # pages
_SMALL = 2**30  # bytes; of larger files, pages that no sample needs yet would take too much of the network
_POLL_S = 1.0  # between two looks at waits that are over
_Pages = dict[int, bytes]


class RemoteTokenFile:
    """A .bin file at a URL, with the interface of TokenFile. Threads may read it at the same time.

    All pages that one call needs are requested at the same time. Pages that lie one behind another are one request. Of
    a file up to 1 GiB that fits into half of the cache, 4 pages are requested instead of one: all of them will soon be
    needed. A page that another process of this host or another thread is requesting is not requested again.

    Without `cache`, or if the store names no version of the file, each read goes to the store.

    If the store fails, reads wait: 120 s, or without limit after `wait_without_limit`. Raises ConfigError then, and if
    the file in the store is another one than when it was opened.
    """

    def __init__(self, url: str, cache: PageCache | None) -> None:
        self.remote = RemoteFile(url)
        self.path = self.remote.name
        identity = f"{self.remote.name} {self.remote.size} {self.remote.version}"
        self._key = hashlib.sha256(identity.encode()).digest()[:16]
        self._cache = cache if self.remote.version else None
        self._reads_ahead = self._cache is not None and self.remote.size <= min(self._cache.num_bytes // 2, _SMALL)
        self._num_pages = -(-self.remote.size // PAGE_BYTES)
        self._pending: dict[int, Future[_Pages]] = {}  # page -> the request for it
        self._lock = threading.Lock()

    def status(self) -> os.stat_result:
        """Return size and modification time, which is a number that stands for the version in the store."""
        version = int.from_bytes(hashlib.sha256(self.remote.version.encode()).digest()[:7], "little")
        return os.stat_result((0, 0, 0, 0, 0, 0, self.remote.size, 0, 0, 0), {"st_mtime_ns": version})

    def wait_without_limit(self, report: Callable[[str, bool], None]) -> None:
        """Let reads wait for the store for as long as it fails. `report`: see RemoteFile."""
        self.remote.patience_s, self.remote.report = math.inf, report

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes [start, start + num_bytes)."""
        buffer = np.empty(num_bytes, np.uint8)
        self.read_pieces([start], [num_bytes], buffer)
        return buffer.tobytes()

    def read_pieces(self, starts: Iterable[int], sizes: Iterable[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Fill `buffer` with sizes[i] bytes from starts[i] on, piece after piece."""
        pieces = [(start, size) for start, size in zip(starts, sizes, strict=True) if size]
        for start, size in pieces:
            if not 0 <= start <= start + size <= self.remote.size:
                raise ConfigError(self.path, problem=f"it has no bytes {start} to {start + size}")
        numbers = {number for start, size in pieces
                   for number in range(start // PAGE_BYTES, (start + size - 1) // PAGE_BYTES + 1)}
        pages = self._pages(sorted(numbers))
        view, filled = buffer.data, 0
        for start, size in pieces:
            end = start + size
            while start < end:
                number, offset = divmod(start, PAGE_BYTES)
                part = memoryview(pages[number])[offset:offset + end - start]
                view[filled:filled + len(part)] = part
                filled, start = filled + len(part), start + len(part)

    def _pages(self, numbers: Sequence[int]) -> _Pages:
        """Return these pages, whose numbers ascend, from the cache and from the store."""
        found = self._cached(numbers)
        missing = [number for number in numbers if number not in found]
        if missing:
            for future in self._request(missing):
                found |= future.result()
        return found

    def _cached(self, numbers: Iterable[int]) -> _Pages:
        if self._cache is None:
            return {}
        pages = ((number, self._cache.get(self._key, number)) for number in numbers)
        return {number: data for number, data in pages if data is not None and len(data) == self._page_bytes(number)}

    def _request(self, missing: Sequence[int]) -> list[Future[_Pages]]:
        """Return requests for these pages: those that other threads have begun, and new ones."""
        futures: list[Future[_Pages]] = []
        with self._lock:
            futures += {id(self._pending[number]): self._pending[number]
                        for number in missing if number in self._pending}.values()
            for run in _runs([number for number in missing if number not in self._pending],
                             self._num_pages if self._reads_ahead else None):
                future = _request_threads().submit(self._fetch, run)
                self._pending.update(dict.fromkeys(run, future))
                futures.append(future)
        return futures

    def _fetch(self, run: range) -> _Pages:
        """Request the pages of a run, and store them."""
        try:
            with self._cache.claim(self._key, run[0]) if self._cache is not None else nullcontext():
                found = self._cached(run)  # another process may have requested them meanwhile
                if len(found) < len(run):
                    found = self._from_store(run)
                    for number, data in found.items():
                        if self._cache is not None:
                            self._cache.put(self._key, number, data)
                return found
        finally:
            with self._lock:
                for number in run:
                    self._pending.pop(number, None)

    def _from_store(self, run: range) -> _Pages:
        first = run[0] * PAGE_BYTES
        data = self.remote.read(first, len(run) * PAGE_BYTES)
        if not self.remote.pins_version:  # may be bytes of a newer version
            self.remote.check_version()
        return {number: data[number * PAGE_BYTES - first:][:PAGE_BYTES] for number in run}

    def _page_bytes(self, number: int) -> int:
        return min(PAGE_BYTES, self.remote.size - number * PAGE_BYTES)


class StoreWaits(Callback):
    """Lets each rank wait for its data for as long as the store does not answer, and records the waits of rank 0."""

    order = 1  # other callbacks read data when they start

    def __init__(self) -> None:
        self._next_poll = 0.0

    def start(self, run: Run) -> None:
        def report(line: str, waits: bool) -> None:
            run.watchdog.note(line if waits else "")
            if run.world.rank == 0:
                run.screen.line(f"warning: {line}" if waits else line)
            else:
                say(f"rank {run.world.rank}: {line}")

        for dataset in run.plan.datasets.values():
            for source in dataset.sources:
                if isinstance(source.file, RemoteTokenFile):
                    source.file.wait_without_limit(report)
        self._files = [source.file for source in run.plan.datasets["train"].sources
                       if isinstance(source.file, RemoteTokenFile)]

    def end_step(self, run: Run) -> None:
        """Record that a store did not answer for some time and answers again."""
        now = time.monotonic()
        if run.world.rank != 0 or now < self._next_poll:
            return
        self._next_poll = now + _POLL_S
        for file in self._files:
            (seconds, answer), file.remote.last_wait = file.remote.last_wait, (0.0, "")
            if seconds:
                run.event("store_wait", reason=answer, seconds=round(seconds, 1), name=file.path)


def _runs(numbers: Sequence[int], num_pages: int | None) -> list[range]:
    """Group pages into runs, each of which is one request.

    num_pages: of the file, if 4 pages are requested instead of one.
    """
    if num_pages is not None:
        firsts = dict.fromkeys(number // _AHEAD * _AHEAD for number in numbers)
        numbers = [number for first in firsts for number in range(first, min(first + _AHEAD, num_pages))]
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number and len(runs[-1]) < _LARGEST_REQUEST:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


@functools.cache
def _request_threads() -> DaemonThreads:
    """Return the threads that wait for the store, for all files of this process."""
    return DaemonThreads(_REQUESTS, name="store")
