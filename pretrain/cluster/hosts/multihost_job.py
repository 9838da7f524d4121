"""Run DeepSpeed's launcher for several hosts: pass signals to all ranks, and end all ranks when a host fails."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from pretrain.cli import say
from pretrain.cluster.hosts.launcher_process import SignalRecorder
from pretrain.cluster.hosts.remote import HostError, Transport, call_on_all, call_probe
from pretrain.errors import FINISHED, GUARD, HANG, REJECTED, STOPPED

LOST = 255  # ssh's exit code when the connection breaks
# A rank that exits with one of these codes makes the other ranks crash. Their codes say nothing about the cause.
_ROOT_CAUSE_CODES = (REJECTED, GUARD, HANG)
_PDSH_FAILURE = re.compile(r"pdsh@[^:]*: (?P<host>\S+): ssh exited with exit code (?P<code>\d+)")
_POLL_S = 0.2
_LAUNCHER_EXIT_S = 5.0  # time that the launcher gets to exit after all ranks have ended


def combine_exit_codes(codes: Iterable[int]) -> int:
    """Combine the exit codes of the hosts into one.

    A code of `_ROOT_CAUSE_CODES` has priority. Otherwise the largest code wins, but 75 (saved) only if no host crashed.
    """
    failed = [code for code in codes if code != 0]
    for code in _ROOT_CAUSE_CODES:
        if code in failed:
            return code
    return max((code for code in failed if code != STOPPED), default=STOPPED if failed else FINISHED)


@dataclass(frozen=True)
class MultihostJob:
    """One start of a run on several hosts."""

    name: str  # value of probe.JOB_VARIABLE in the environment of each process of this start
    ranks: Mapping[str, int]  # host -> number of ranks, for all hosts in rank order
    hosts: Sequence[str]  # hosts that this process controls; other hosts run their own launcher
    transport: Transport
    grace_s: float  # seconds from the failure of one host until the ranks on the other hosts are killed

    def describe_first_failure(self, codes: Mapping[str, int]) -> str:
        """Describe the first host in `codes` (host -> exit code) that failed: its name, ranks and exit code."""
        host, code = next(item for item in codes.items() if item[1] != 0)
        names = list(self.ranks)
        first = sum(self.ranks[other] for other in names[:names.index(host)])
        ranks = f"rank {first}" if self.ranks[host] == 1 else f"ranks {first} to {first + self.ranks[host] - 1}"
        if code == LOST:
            return f"the connection to {host} ({ranks}) was lost"
        return f"{host} ({ranks}) failed with exit code {code}"

    def signal_ranks(self, number: int) -> bool:
        """Send a signal to all ranks that can save. Returns False if no rank can, because training has not begun."""
        answers = self._call("signal_ranks", number)
        for host, answer in answers.items():
            if isinstance(answer, HostError):
                say(f"{host}: could not send {signal.Signals(number).name} to its ranks: {answer}")
        return any(answers.values())

    def end(self, patience_s: float = 0) -> None:
        """Wait up to `patience_s` until all processes of the job have ended, then kill the remaining ones."""
        answers = self._call("end_job", patience_s, timeout_s=patience_s + 20)
        for host, ended in answers.items():
            if isinstance(ended, HostError):
                say(f"{host}: could not end the remaining processes: {ended}")
            elif ended:
                say(f"{host}: ended {len(ended)} remaining process{'es' * (len(ended) > 1)}")

    def _call(self, function: str, *args: Any, timeout_s: float = 15) -> dict[str, Any]:
        """Call a function of probe.py, with the job's name, on all controlled hosts. Returns host -> result."""
        return call_on_all(self.hosts, lambda host: call_probe(self.transport, host, function, self.name, *args,
                                                               timeout_s=timeout_s))


@dataclass
class JobState:
    """State of a running job. Several threads write to this object."""

    codes: dict[str, int] = field(default_factory=dict)  # host -> exit code, for hosts that have ended
    first_failure: float | None = None  # time of the first failure, by time.monotonic()

    def read_stderr(self, stream: IO[str]) -> None:
        """Copy the launcher's stderr to ours, and record the hosts that pdsh reports as failed."""
        for line in stream:
            sys.stderr.write(line)
            sys.stderr.flush()
            match = _PDSH_FAILURE.match(line)
            if match:
                self.record_exit(match["host"], int(match["code"]))

    def record_exit(self, host: str, code: int) -> None:
        """Record that the ranks of a host ended with `code`."""
        self.codes.setdefault(host, code)
        if code != 0:
            self.first_failure = self.first_failure or time.monotonic()

    def grace_is_over(self, job: MultihostJob) -> bool:
        """Return whether the grace period after the first failure is over and some hosts still run."""
        return self.first_failure is not None and time.monotonic() - self.first_failure > job.grace_s \
            and len(self.codes) < len(job.ranks)


def run_job(command: Sequence[str], environ: Mapping[str, str], job: MultihostJob,
            listen: Callable[[JobState], None] | None = None) -> int:
    """Run `deepspeed` until the ranks on all hosts have ended. Returns the exit code of the run.

    On SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1, all ranks save and exit with 75. If training has not begun, they end
    at once. A second signal changes nothing, a third one ends all ranks at once.

    Args:
        command: command line of `deepspeed`.
        environ: environment variables of `deepspeed`.
        job: the hosts and ranks.
        listen: runs in a thread, and records exits of hosts that `deepspeed` does not report.
    """
    state = JobState()
    with SignalRecorder() as signals, subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, text=True,
                                                       stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=state.read_stderr, args=[process.stderr], daemon=True)
        reader.start()
        if listen is not None:
            threading.Thread(target=listen, args=[state], daemon=True).start()
        _wait(process, job, state, signals)
        codes = list(state.codes.values())  # copied before job.end() kills ranks, which adds codes
        ended_by_us = signals.ended_by != 0 or process.poll() is None
        if ended_by_us:
            job.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAUNCHER_EXIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(_LAUNCHER_EXIT_S)
    code = combine_exit_codes(codes if ended_by_us else [*state.codes.values(), process.returncode])
    if not ended_by_us and code not in (FINISHED, STOPPED) and any(state.codes.values()):
        say(job.describe_first_failure(state.codes))
    if not ended_by_us and code != 0:
        since_failure_s = time.monotonic() - (state.first_failure or time.monotonic())
        job.end(patience_s=max(job.grace_s - since_failure_s, 0))
    return 128 + signals.ended_by if signals.ended_by else code


def _wait(process: "subprocess.Popen[str]", job: MultihostJob, state: JobState, signals: SignalRecorder) -> None:
    """Wait until the launcher has ended or all ranks must be killed."""
    while process.poll() is None and not signals.must_end(job.signal_ranks):
        if state.grace_is_over(job):
            say(f"{job.describe_first_failure(state.codes)}; other hosts still run {job.grace_s:g} s later and are "
                "ended now")
            return
        time.sleep(_POLL_S)
