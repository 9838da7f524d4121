"""Apply a function to a stream of jobs in worker processes, and yield the results in the order of the jobs.

Each worker has a connection of its own: if a worker is killed, even within a result, its connection ends at once.
(concurrent.futures.ProcessPoolExecutor shares one pipe between all workers, and may wait forever in this case.)
"""

import contextlib
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from pretrain.child import child_command
from pretrain.errors import ConfigError

Job = TypeVar("Job")
Result = TypeVar("Result")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # sent to the process group: only the parent handles them
_JOBS_PER_WORKER = 3  # one that it works on, and those that wait


def map_in_order(make: Callable[[], Callable[[Job], Result]], jobs: Iterator[Job],
                 workers: int) -> Iterator[tuple[Job, Result]]:
    """Yield (job, result) in order. With one worker, this process does the work.

    Each worker calls `make` once, and then the function that it returned for each of its jobs. A few jobs per worker
    are read ahead. Raises ConfigError if a worker ends. All workers end with the iterator, and with this process.
    """
    if workers == 1:
        work = make()
        yield from ((job, work(job)) for job in jobs)
        return
    pool: _Pool[Job, Result] = _Pool(make, workers)
    try:
        yield from pool.map(jobs)
    finally:
        pool.kill()


class _Worker:
    """A worker process, and a thread that sends it its jobs: this process never waits until a worker reads."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        # Not fork: a child would inherit locks of the parent's threads (progress bar, torch). The start methods spawn
        # and forkserver of multiprocessing import modules from the working folder.
        self.connection, theirs = Pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # also in the new process
        try:
            self.process = subprocess.Popen(child_command("pretrain.data.prepare.worker_pool", str(theirs.fileno())),
                                            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.numbers: deque[int] = deque()  # numbers of the jobs without a result
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put(sys.path)
        self._jobs.put(make)
        threading.Thread(target=self._send_jobs, daemon=True).start()

    def start(self, number: int, job: Any) -> None:
        self.numbers.append(number)
        self._jobs.put(job)

    def _send_jobs(self) -> None:
        with contextlib.suppress(OSError):  # the worker was killed, which the receiver reports
            while (job := self._jobs.get()) is not None:
                self.connection.send_bytes(pickle.dumps(job, protocol=5))

    def kill(self) -> None:
        """Kill the process, which holds nothing that is needed."""
        self._jobs.put(None)
        self.process.kill()
        self.process.wait()


class _Pool(Generic[Job, Result]):
    def __init__(self, make: Callable[[], Callable[[Job], Result]], workers: int) -> None:
        self._workers: list[_Worker] = []
        self._results: dict[int, Result] = {}
        try:
            for _ in range(workers):
                self._workers.append(_Worker(make))
        except BaseException:
            self.kill()
            raise

    def map(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Result]]:
        started: deque[tuple[int, Job]] = deque()
        for number, job in enumerate(jobs):
            while len(started) >= _JOBS_PER_WORKER * len(self._workers):
                yield self._next_result(started)
            min(self._workers, key=lambda worker: len(worker.numbers)).start(number, job)
            started.append((number, job))
        while started:
            yield self._next_result(started)

    def _next_result(self, started: "deque[tuple[int, Job]]") -> tuple[Job, Result]:
        """Wait for the result of the first job. Raises ConfigError if a worker has ended."""
        number, job = started.popleft()
        while number not in self._results:
            ready: list[Any] = wait([worker.connection for worker in self._workers])
            for worker in self._workers:
                if worker.connection in ready:
                    try:
                        kind, value = _receive(worker.connection)
                    except (EOFError, ConnectionError):
                        raise self._ended(worker) from None
                    if kind == "error":
                        raise value
                    self._results[worker.numbers.popleft()] = value
        return job, self._results.pop(number)

    def _ended(self, worker: _Worker) -> ConfigError:
        count, was_killed = len(self._workers), worker.process.wait() < 0
        if was_killed:
            return ConfigError("--workers", problem=f"one of {count} worker processes was killed",
                               remedy="if memory is short, give fewer workers")
        return ConfigError("--workers", problem=f"one of {count} worker processes failed with the error above")

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()


def _work(connection: "Connection[Any, Any]") -> None:
    """Run a worker until its parent ends or kills it. The first message is the function that makes the work."""
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        try:
            # the job may need modules of the user's code
            sys.path += [folder for folder in _receive(connection) if folder not in sys.path]
            work = _receive(connection)()
            while True:
                _send(connection, ("result", work(_receive(connection))))
        except ConfigError as error:
            _send(connection, ("error", error))
            connection.recv_bytes()


def _send(connection: "Connection[Any, Any]", message: tuple[str, Any]) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=5))


def _receive(connection: "Connection[Any, Any]") -> Any:
    """Return the next message. Raises EOFError or ConnectionError if the other process was killed, also within it."""
    try:
        content = connection.recv_bytes()
    except OSError as error:
        if error.errno is None:  # "got end of file during message" (multiprocessing/connection.py) has no errno
            raise EOFError from None
        raise
    return pickle.loads(content)


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
