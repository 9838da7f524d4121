"""One end for all hosts: a job is watched, told to save when asked, and what a failure leaves elsewhere is ended."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from pretrain.cli import say
from pretrain.cluster.hosts.remote import HostError, Reach, ask_all
from pretrain.errors import FINISHED, GUARD, HANG, REJECTED, STOPPED

LOST = 255  # ssh's exit code when the connection breaks
_TOLD_FIRST = (REJECTED, GUARD, HANG)  # the ranks that end because of these only crash
_FAILED = re.compile(r"pdsh@[^:]*: (?P<host>\S+): ssh exited with exit code (?P<code>\d+)")
_POLL_S = 0.2
_LAUNCHER_ENDS_S = 5.0  # after the last process on the hosts


def exit_code(codes: Iterable[int]) -> int:
    """One exit code for the codes of all hosts: the cause rather than what followed from it; 75 only if all saved."""
    failed = [code for code in codes if code != 0]
    for code in _TOLD_FIRST:
        if code in failed:
            return code
    return max((code for code in failed if code != STOPPED), default=STOPPED if failed else FINISHED)


@dataclass(frozen=True)
class Job:
    """One start of a run on several hosts; `name` marks its processes (probe.JOB_VARIABLE)."""

    name: str
    ranks: Mapping[str, int]  # host -> number of ranks there, of all hosts in their order
    hosts: Sequence[str]  # those that `reach` reaches; the others have a launcher of their own
    reach: Reach
    grace_s: float  # from the first failure until the others are ended

    def first_failed(self, codes: Mapping[str, int]) -> str:
        """The first host that failed, its ranks, and how."""
        host, code = next(item for item in codes.items() if item[1] != 0)
        names = list(self.ranks)
        first = sum(self.ranks[other] for other in names[:names.index(host)])
        ranks = f"rank {first}" if self.ranks[host] == 1 else f"ranks {first} to {first + self.ranks[host] - 1}"
        return f"{host} ({ranks}) " + (f"failed with exit code {code}" if code != LOST else "was lost")

    def tell(self, number: int) -> None:
        """Send a signal to every rank."""
        for host, told in self._ask("signal_ranks", number).items():
            if isinstance(told, HostError):
                say(f"{host}: its ranks cannot be told: {told}")

    def end(self, patience_s: float = 0) -> None:
        """End every process of the job on every host; those that end by themselves within `patience_s` may."""
        answers = self._ask("end_job", patience_s, timeout_s=patience_s + 20)
        for host, ended in answers.items():
            if isinstance(ended, HostError):
                say(f"{host}: cannot be reached to end what remains there: {ended}")
            elif ended:
                say(f"{host}: ended {len(ended)} process{'es' * (len(ended) > 1)} that remained")

    def _ask(self, question: str, *words: Any, timeout_s: float = 15) -> dict[str, Any]:
        return ask_all(self.reach, dict.fromkeys(self.hosts, (question, self.name, *words)), timeout_s=timeout_s)


@dataclass
class Watch:
    """What is known of a running job."""

    codes: dict[str, int] = field(default_factory=dict)  # host -> exit code other than 0
    first_failure: float | None = None  # time.monotonic()
    signals: list[int] = field(default_factory=list)  # received by the launcher, not yet dealt with

    def read(self, stream: IO[str]) -> None:
        """Pass on the launcher's stderr, and note the hosts that pdsh reports as failed."""
        for line in stream:
            sys.stderr.write(line)
            sys.stderr.flush()
            match = _FAILED.match(line)
            if match:
                self.failed(match["host"], int(match["code"]))

    def failed(self, host: str, code: int) -> None:
        """Note that the ranks of a host ended with `code`."""
        self.codes.setdefault(host, code)
        if code != 0:
            self.first_failure = self.first_failure or time.monotonic()

    def others_run_on(self, job: Job) -> bool:
        """Whether the grace since the first failure is over, and pdsh waits for other hosts."""
        return self.first_failure is not None and time.monotonic() - self.first_failure > job.grace_s \
            and len(self.codes) < len(job.ranks)


def run_job(command: Sequence[str], environ: Mapping[str, str], job: Job,
            listen: Callable[[Watch], None] | None = None) -> int:
    """Run `deepspeed` to its end and every host with it. Returns the exit code of the run.

    `listen`, in a thread of its own, notes failures that the launcher does not report.
    SIGUSR1 and the first SIGTERM: all ranks save and exit with 75. SIGINT and a second SIGTERM: all ranks end.
    """
    watch = Watch()
    with _received_by(watch), subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, text=True,
                                               stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=watch.read, args=[process.stderr], daemon=True)
        reader.start()
        if listen is not None:
            threading.Thread(target=listen, args=[watch], daemon=True).start()
        interrupted = _wait(process, job, watch)
        codes = list(watch.codes.values())  # what ends from here on, ends because of us
        ended_by_us = interrupted is not None or process.poll() is None
        if ended_by_us:
            job.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAUNCHER_ENDS_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(_LAUNCHER_ENDS_S)
    code = exit_code(codes if ended_by_us else [*watch.codes.values(), process.returncode])
    if not ended_by_us and code not in (FINISHED, STOPPED) and any(watch.codes.values()):
        say(job.first_failed(watch.codes))
    if not ended_by_us and code != 0:
        job.end(patience_s=max(job.grace_s - (time.monotonic() - (watch.first_failure or time.monotonic())), 0))
    return code if interrupted is None else 128 + interrupted


def _wait(process: "subprocess.Popen[str]", job: Job, watch: Watch) -> int | None:
    """Until the launcher has ended, or the hosts must be ended. Returns the signal that demands it, if one does."""
    told = False
    while process.poll() is None:
        if watch.signals:
            number = watch.signals.pop(0)
            if number == signal.SIGINT or (number == signal.SIGTERM and told):
                return number
            if not told:
                say("asked to stop: all ranks save first")
                job.tell(signal.SIGUSR1)
                told = True
        if watch.others_run_on(job):
            say(f"{job.first_failed(watch.codes)}, and others still run {job.grace_s:g} s later: they are ended")
            return None
        time.sleep(_POLL_S)
    return None


@contextlib.contextmanager
def _received_by(watch: Watch) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda received, _: watch.signals.append(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
