"""Start a run, start it again when it stops or crashes, and say when there is no use in it.

A launcher hides the ranks' exit codes: `deepspeed` ends with 247 for a killed rank, 1 when it is asked to end, the
largest code of its hosts with pdsh, and 0 when its own child was killed. So what the run wrote about its end
(events.jsonl, checkpoints) goes before the code.
"""

import contextlib
import fcntl
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pretrain.checkpoint.format.manifest import newest_step
from pretrain.cluster.hosts.remote import Reach
from pretrain.cluster.supervise import launch_command as launch
from pretrain.cluster.supervise.host_checks import DEFAULT_HEALTH_COMMAND, LOCAL, ranks_on, reach_hosts, unhealthy
from pretrain.cluster.supervise.processes import adopt_orphans, ask_to_save, descendants, end_descendants
from pretrain.cluster.supervise.restart_log import Ledger, Progress, Start, marks, read_progress, step_seconds
from pretrain.errors import CRASHED, FINISHED, GUARD, HANG, NO_RESTART, REJECTED, STOPPED, ConfigError
from pretrain.monitor.rows import read_starts

_SAID = {REJECTED: "refused", STOPPED: "stopped", GUARD: "stopped by the bad-step guard", HANG: "hang"}
_POLL_S, _ASK_AGAIN_S, _TERM_S = 0.2, 1.0, 10.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to run, and when to stop trying."""

    command: list[str]
    run: Path  # the run folder
    hostfile: Path | None = None  # None: the launcher alone knows the hosts, and nobody checks them
    max_restarts: int = 5  # in a row, without a step beyond the last
    min_hosts: int | None = None  # go on with so many; None: wait for all
    backoff_s: float = 10.0  # before a restart; doubled for each one without progress
    backoff_max_s: float = 600.0
    grace_s: float = 1800.0  # for a run that was asked to save and end
    health_command: str = DEFAULT_HEALTH_COMMAND
    health_timeout_s: float = 60.0
    reach: Reach = field(default_factory=reach_hosts)


class Heard:
    """From now on SIGTERM, SIGINT and SIGUSR1 are remembered instead of ending this process."""

    def __init__(self) -> None:
        self.name, self.impatient = "", False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.impatient = bool(self.name) and number == signal.SIGINT  # Ctrl-C again: do not wait for the save
        self.name = self.name or signal.Signals(number).name


def supervise(settings: Settings, say: Say) -> int:
    """Run the command until it has finished, is refused, or does not get on. Returns the exit code of the whole.

    That is the last start's, as train.py would have given it; 75 after a signal. Raises ConfigError.
    """
    if settings.min_hosts is not None:
        if settings.hostfile is None:
            raise ConfigError("--min_hosts", found=settings.min_hosts, expected="a --hostfile with it")
        launch.check_can_lose_hosts(settings.command)
    with _only_supervisor(settings.run):
        _refuse_second_run(settings)
        heard, ledger = Heard(), Ledger(settings.run)
        adopt_orphans()
        try:
            code, outcome = _start_until_done(settings, ledger, heard, say)
        except ConfigError as error:
            ledger.close(f"refused: {error}")
            raise
        row = ledger.close(outcome)
        say(f"{outcome}; {row['starts']} start{'s' * (row['starts'] != 1)}, step {row['last_step']}, goodput "
            f"{row['goodput']:.1%} = {row['productive_seconds']:.1f} s of steps in {row['wall_seconds']:.1f} s")
        return code


def _start_until_done(settings: Settings, ledger: Ledger, heard: Heard, say: Say) -> tuple[int, str]:
    """(exit code, outcome). The pause between two starts grows as long as nothing is gained."""
    farthest, fruitless = newest_step(settings.run / "checkpoints"), 0
    while True:
        start, seconds = _start(settings, len(ledger.starts) + 1, heard, say)
        ledger.add(start, seconds)
        if start.exit_code == FINISHED or start.exit_code in NO_RESTART:
            return start.exit_code or 0, start.reason
        if heard.name:
            return STOPPED, f"{heard.name}: {start.reason}"
        fruitless = 0 if start.last_step > farthest else fruitless + 1
        farthest = max(farthest, start.last_step)
        if fruitless > settings.max_restarts:
            return _shell_code(start.exit_code), f"{start.reason}; gave up after {settings.max_restarts} restarts " \
                                                 f"without a step beyond {farthest}"
        pause = backoff(settings, fruitless)
        say(f"{start.reason} at step {start.last_step}; the next start goes on from step {start.kept_step}, "
            f"in {pause:g} s")
        if not _sleep(pause, heard):
            return STOPPED, f"{heard.name} between two starts"


def backoff(settings: Settings, fruitless: int) -> float:
    """Seconds until the next start after so many in a row that did not get on."""
    return float(min(settings.backoff_s * 2 ** min(fruitless, 60), settings.backoff_max_s))


def _sleep(seconds: float, heard: Heard) -> bool:
    """False: a signal came."""
    deadline = time.monotonic() + seconds
    while not heard.name and time.monotonic() < deadline:
        time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))
    return not heard.name


def _start(settings: Settings, number: int, heard: Heard, say: Say) -> tuple[Start, dict[int, float]]:
    """One start, from the hosts' health to its row in the ledger, with the seconds of each step that it got done."""
    began, tick, since = time.time(), time.monotonic(), marks(settings.run)
    command, hosts, ill = _choose_hosts(settings, say)
    if ill or heard.name:
        code, reason = None, ill or "not started"
    else:
        if number > 1:
            _end_leftovers(settings)
        step = newest_step(settings.run / "checkpoints")
        say(f"start {number} from step {step}" + (f" on {', '.join(hosts)}" if hosts else ""))
        code = _run(command, settings, since, heard)
    progress = read_progress(settings.run, since)
    if code is not None:
        code, reason = judge(code, progress, last_step=_planned_steps(settings))
    seconds = step_seconds(progress)
    return Start(time=began, start=number, exit_code=code, reason=reason, first_step=progress.first_step,
                 last_step=progress.last_step, kept_step=progress.kept_step, hosts=hosts,
                 productive_seconds=sum(seconds.values()), wall_seconds=time.monotonic() - tick), seconds


def _choose_hosts(settings: Settings, say: Say) -> tuple[list[str], list[str], str]:
    """(command, hosts that take part, "" or why there can be no start now). Raises ConfigError."""
    if settings.hostfile is None:
        return settings.command, [], ""
    hosts = launch.hosts_of(settings.command, settings.hostfile)
    ill = unhealthy(hosts, settings.health_command, settings.reach, settings.health_timeout_s)
    well = {host: slots for host, slots in hosts.items() if host not in ill}
    for host, wrong in ill.items():
        say(f"host {host} is not well: {wrong}")
    whole = launch.with_hostfile(settings.command, settings.hostfile)
    if not ill:
        return whole, list(well), ""
    before = _newest_record(settings.run)  # without it nobody knows the global batch
    if settings.min_hosts is None or len(well) < settings.min_hosts or before is None:
        return whole, list(well), "host " + ", ".join(f"{host}: {wrong}" for host, wrong in ill.items())
    say(f"going on without {', '.join(ill)}")
    return launch.for_fewer_hosts(settings.command, well, list(ill), settings.run / "hostfile.supervised",
                                  before), list(well), ""


def _run(command: Sequence[str], settings: Settings, since: dict[str, int], heard: Heard) -> int:
    """Run the command to its end, passing on a signal that was heard. Nothing below this process remains."""
    try:
        # a session of its own: Ctrl-C reaches the ranks once, through us, and not their launcher, which would end them
        child = subprocess.Popen(list(command), start_new_session=True)
    except OSError as error:
        raise ConfigError("the command", found=f"{command[0]} ({error.strerror})",
                          expected="a program that starts the run") from None
    try:
        while not heard.name:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL_S)
        return _wait_for_save(child, settings, since, heard)
    finally:
        end_descendants(grace_s=_TERM_S)


def _wait_for_save(child: subprocess.Popen[bytes], settings: Settings, since: dict[str, int], heard: Heard) -> int:
    """Ask the ranks to save, here or on their hosts, and wait for the end. 75 where there is nothing to wait for.

    A rank listens as soon as it trains: ranks that do not are starting, and have nothing to save.
    """
    deadline = time.monotonic() + settings.grace_s
    asked: set[int] = set()
    while time.monotonic() < deadline and not heard.impatient:
        if not asked:
            asked.update(ask_to_save(descendants()))
            asked.update(pid for pids in _on_hosts(settings, "save").values() for pid in pids)
        if not asked and not read_progress(settings.run, since).began:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_ASK_AGAIN_S)
    return STOPPED


def judge(code: int, progress: Progress, *, last_step: int | None) -> tuple[int, str]:
    """(exit code as train.py would have given it, the reason in words) of a launcher's `code`.

    `last_step` is where the run is complete; None: nobody knows.
    """
    complete = last_step is not None and progress.kept_step >= last_step
    stop = progress.stop
    if stop is not None and (complete or stop["reason"] in ("finished", "--exit_step")):
        return FINISHED, "finished"
    if code == 0 and complete:
        return FINISHED, "finished"
    if code in (REJECTED, GUARD, HANG):
        return code, _SAID[code]
    if stop is not None:
        return STOPPED, f"saved on {stop['reason']}"
    if code == STOPPED:
        return STOPPED, _SAID[STOPPED]
    if code == 0:
        return CRASHED, "crash: the launcher ended with 0, the run had not finished"
    return code, f"crash: {_describe(code)}"


def _describe(code: int) -> str:
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 256 - code if code > 224 else 0
    if code == 255:
        return "exit code 255, ssh's own when it loses a host"
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} (exit code {code})"
    return f"exit code {code}"


def _shell_code(code: int | None) -> int:
    return CRASHED if code is None else 128 - code if code < 0 else code


def _planned_steps(settings: Settings) -> int | None:
    """The step at which the run is complete, by its flags, and by its own record where they say tokens."""
    record = _newest_record(settings.run) or {}
    steps = launch.run_setting(settings.command, "train_steps") or record.get("train_steps")
    limits = [int(str(value)) for value in (steps, launch.run_setting(settings.command, "exit_step"))
              if str(value).isdecimal()]
    return min(limits) if limits else None


def _newest_record(run: Path) -> dict[str, Any] | None:
    """The last one of run.json; None where no start has come so far."""
    with contextlib.suppress(ConfigError, LookupError):
        return read_starts(run)[-1]
    return None


def _on_hosts(settings: Settings, action: str) -> dict[str, list[int]]:
    """`ranks_on` all hosts of the hostfile, or this one."""
    hosts = [LOCAL] if settings.hostfile is None else launch.hosts_of(settings.command, settings.hostfile)
    return ranks_on(hosts, action, launch.identity(settings.command), settings.reach)


def _end_leftovers(settings: Settings) -> None:
    """Ranks on other hosts outlive a launcher that ended here, or a cut network; they would disturb the next start."""
    if settings.hostfile is not None:
        _on_hosts(settings, "end")


def _refuse_second_run(settings: Settings) -> None:
    for host, pids in _on_hosts(settings, "list").items():
        raise ConfigError(str(settings.run), found=f"a run at work on {host} (process {', '.join(map(str, pids))})",
                          expected="none", remedy="wait for it, or end it")


@contextlib.contextmanager
def _only_supervisor(run: Path) -> Iterator[None]:
    """Two supervisors would start two runs into one folder. Raises ConfigError for the second."""
    with contextlib.ExitStack() as stack:
        try:
            run.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(run / ".supervisor.lock", "a", encoding="utf-8"))
        except OSError as error:
            raise ConfigError("--save", found=f"{run} ({error.strerror})", expected="a folder to write to") from None
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(str(run), found="another supervisor at work", expected="one for a run") from None
        except OSError:  # a file system without locks
            pass
        yield
