"""Apply the faults of a schedule to a supervised run, each at its scheduled step or phase."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from pretrain.monitor.read_run_folder import read_events
from tests.extensions.supervise.chaos import processes
from tests.extensions.supervise.chaos.damage import LinkedData, damage_checkpoint, damage_latest
from tests.extensions.supervise.chaos.faults import CHECKPOINT_DAMAGE, KINDS, Fault, Schedule
from tests.extensions.supervise.chaos.processes import NotAppliedError
from tests.extensions.supervise.chaos.watch import CheckpointLedger, RunWatch

_POLL_S = 0.1
_LAUNCH_S = 4.0  # from a start to its first step, on an idle machine
_LONGEST_PAUSE_S = 2.0
_TRIES = 3
_FEWEST_INTACT = 2  # undamaged checkpoints before one is damaged, so that the run can always resume
_HANG_GRACE_S = 120.0  # after --step_timeout: dumps, exit codes, launchers
_ANSWER_S = 20.0  # time in which a rank executes an instruction
_END_LIMIT_S = 300.0  # a fault that has not ended its start after this time has had no effect
PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class ChaosSettings:
    """The command of the run, and the faults."""

    command: list[str]
    run: Path
    kinds: tuple[str, ...]
    faults: int
    seed: int
    stall_s: float  # without a step, a start or a fault in this time, the run is ended
    train_steps: int
    train_data: str  # the first prefix; the run reads it through links in `instructions`
    keep_checkpoints: int
    step_timeout: float

    @property
    def instructions(self) -> Path:
        """Folder of the files that hooks/sitecustomize.py reads in the ranks."""
        return self.run / "chaos"


@dataclass(frozen=True)
class AppliedFault:
    """A fault that was applied, or that could not be applied."""

    kind: str
    time: float  # in seconds since 1970
    start: int  # number of the start that it hit; for damage while the run is down, of the next start
    rows: int  # number of steps that were logged before, by all starts
    what: str
    applied: bool = True
    ended: bool = True  # False: the start should have ended, and did not


class RunEndedError(Exception):
    """The run has ended, so no further fault can be applied."""


class FaultInjector(threading.Thread):
    """Thread that applies the faults, while the main thread runs the supervisor.

    The main thread calls `before_start` and `finish`.
    """

    def __init__(self, settings: ChaosSettings, schedule: Schedule, watch: RunWatch, ledger: CheckpointLedger,
                 data: LinkedData | None, print_line: PrintLine) -> None:
        super().__init__(name="faults", daemon=True)
        self._settings, self._schedule, self._watch, self._ledger = settings, schedule, watch, ledger
        self._data, self._print_line = data, print_line
        self._pending: list[Fault] = []  # damage that is done before the next start
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._active = time.monotonic()  # last step, start or fault
        self._progress = (0, 0)
        self.applied: list[AppliedFault] = []
        self.newest_intact: list[int] = []  # step of the newest undamaged checkpoint at each start
        self.failure = ""  # why the run was ended early

    def run(self) -> None:
        try:
            for fault in self._schedule.faults:
                self._apply_in_time(fault)
            while True:  # watch for a stall until the run ends
                self._poll()
        except RunEndedError:
            pass
        except Exception as error:
            self._end_run(f"the fault injection failed: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """End the thread. The supervised run has ended."""
        self._finished.set()
        self.join()

    def before_start(self, number: int) -> None:
        """Damage files while no process of the run exists. The supervisor calls this before each start."""
        with self._lock:
            pending, self._pending = self._pending, []
        truncated = False
        for fault in pending:
            if fault.kind == "data" and truncated:
                self._pending.append(fault)  # one rejection for each truncation
                continue
            truncated = truncated or fault.kind == "data"
            try:
                self._record(fault, self._damage(fault), start=self._watch.num_starts + 1)
            except NotAppliedError:
                with self._lock:
                    self._pending.append(fault)  # too few undamaged checkpoints exist: before a later start
        intact = self._ledger.observe()
        self.newest_intact.append(intact[0][1].step if intact else 0)
        self._watch.mark_start()

    def _apply_in_time(self, fault: Fault) -> None:
        if fault.when == "down":
            with self._lock:
                self._pending.append(fault)
            return
        for attempt in range(_TRIES):
            self._wait_for_moment(fault)
            try:
                self._apply(fault)
                return
            except NotAppliedError as error:
                if attempt + 1 == _TRIES:
                    self._record(fault, str(error), applied=False)

    def _wait_for_moment(self, fault: Fault) -> None:
        if fault.when == "starting":
            self._sleep(fault.delay * _LAUNCH_S)
            if fault.kind != "kill_launcher":
                self._wait(lambda: bool(processes.ranks(self._settings.command)))
            return
        self._wait(lambda: self._watch.current_step() >= max(fault.step, 1))
        self._sleep(fault.delay * self._watch.steps()[-1]["step_time_ms"] / 1e3)
        if fault.kind in CHECKPOINT_DAMAGE:
            self._wait(lambda: len(self._ledger.observe()) >= _FEWEST_INTACT)

    def _apply(self, fault: Fault) -> None:
        random, start, command = Random(fault.seed), self._watch.num_starts, self._settings.command
        if fault.kind == "pause":
            seconds = random.uniform(0.1, 1.0) * _LONGEST_PAUSE_S
            with processes.stopped_rank(command, random) as victim:
                time.sleep(seconds)
            self._record(fault, f"SIGSTOP of process {victim.pid} for {seconds:.1f} s")
        elif fault.kind == "disk_full":
            self._record(fault, self._fill_disk(start))
        elif fault.kind == "hang":
            self._hang(fault, start, random)
        elif KINDS[fault.kind].effect == "damages":
            self._record(fault, self._damage(fault))
        else:
            self._end_start(fault, start, random)

    def _end_start(self, fault: Fault, start: int, random: Random) -> None:
        command = self._settings.command
        if fault.kind == "cut_link":
            ranks = processes.ranks(command)
            if len(ranks) < 2:
                raise NotAppliedError("the run has fewer than two ranks")
            victim = random.choice(ranks)
            self._cut_link(victim.pid)
            what = f"TCP connections of process {victim.pid} shut down"
        else:
            what = {"kill_rank": processes.kill_rank, "kill_launcher": processes.kill_launcher,
                    "signal": processes.send_signal}[fault.kind](command, random)
        self._record(fault, what, start=start)
        limit = time.monotonic() + _END_LIMIT_S
        self._wait(lambda: self._watch.num_starts > start or time.monotonic() > limit)
        if self._watch.num_starts == start:
            self.applied[-1] = replace(self.applied[-1], ended=False)

    def _cut_link(self, pid: int) -> None:
        """Ask a rank to shut down its TCP connections, and wait until it has done so."""
        request = self._settings.instructions / f"cut_link.{pid}"
        request.touch()
        deadline = time.monotonic() + _ANSWER_S
        while request.exists():
            if time.monotonic() > deadline:
                request.unlink(missing_ok=True)
                raise NotAppliedError(f"process {pid} did not execute the instruction")
            time.sleep(_POLL_S)

    def _hang(self, fault: Fault, start: int, random: Random) -> None:
        limit = time.monotonic() + self._settings.step_timeout + _HANG_GRACE_S
        victim, ended = None, False
        try:
            with processes.stopped_rank(self._settings.command, random) as victim:
                self._wait(lambda: self._watch.num_starts > start or time.monotonic() > limit)
                ended = self._watch.num_starts > start
        finally:
            if victim is not None:
                self._record(fault, f"SIGSTOP of process {victim.pid}", start=start,
                             ended=ended or self._finished.is_set())

    def _fill_disk(self, start: int) -> str:
        """Let writes fail until a save has failed, or the start has ended."""
        def failed() -> int:
            return sum(row["event"] == "save_failed" for row in read_events(self._settings.run))

        before, request = failed(), self._settings.instructions / "disk_full"
        request.touch()
        try:
            self._wait(lambda: failed() > before or self._watch.num_starts > start)
        finally:
            request.unlink()
        return "ENOSPC until a save failed" if failed() > before else "ENOSPC until the start ended"

    def _damage(self, fault: Fault) -> str:
        random = Random(fault.seed)
        if fault.kind == "data":
            assert self._data is not None
            return self._data.truncate()
        if fault.kind == "latest":
            if not self._ledger.folder.is_dir():
                raise NotAppliedError("there are no checkpoints")
            return damage_latest(self._ledger.folder, random)
        assert fault.kind in CHECKPOINT_DAMAGE
        intact = self._ledger.observe()
        if len(intact) < _FEWEST_INTACT:
            raise NotAppliedError("there are fewer than two undamaged checkpoints")
        folder, manifest = intact[0]
        self._ledger.mark_damaged(manifest)
        return damage_checkpoint(fault.kind, folder, manifest, random)

    def _record(self, fault: Fault, what: str, *, start: int | None = None, applied: bool = True,
                ended: bool = True) -> None:
        rows = self._watch.steps()
        self.applied.append(AppliedFault(fault.kind, time.time(), self._watch.num_starts if start is None else start,
                                         len(rows), what, applied, ended))
        self._active = time.monotonic()
        self._print_line(f"{'fault' if applied else 'not applied'} {len(self.applied)}: {fault.kind} after step "
                         f"{rows[-1]['step'] if rows else 0}: {what}")

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true. Raises RunEndedError if the run ends first."""
        while not condition():
            self._poll()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() >= deadline)

    def _poll(self) -> None:
        """Sleep for a short time. Raises RunEndedError if the run has ended."""
        if self._finished.wait(_POLL_S):
            raise RunEndedError
        self._ledger.observe()
        progress = (self._watch.num_starts, len(self._watch.steps()))
        if progress != self._progress:
            self._progress, self._active = progress, time.monotonic()
        if time.monotonic() - self._active > self._settings.stall_s:
            self._end_run(f"no step, start or fault for {self._settings.stall_s:g} s")
            raise RunEndedError

    def _end_run(self, reason: str) -> None:
        """Make the supervisor in the main thread end the run at once: a third signal stops its wait for a save."""
        self.failure = reason
        self._print_line(f"{reason}; the run is ended")
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
