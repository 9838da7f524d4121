"""Start a run, restart it after it has stopped or crashed, and give up if restarts make no progress."""

import contextlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace

from pretrain.active_extensions import around_run
from pretrain.checkpoint.format.run_checkpoints import newest_step
from pretrain.cluster.fewer_hosts import record_start
from pretrain.cluster.hosts.launcher_process import (
    SignalRecorder,
    become_subreaper,
    descendants,
    reap_orphans,
    wait_for_launcher,
)
from pretrain.cluster.hosts.probe import ask_to_save, end, end_all
from pretrain.cluster.hosts.remote import (
    LOCAL,
    ranks_on,
)
from pretrain.cluster.outcome import (
    RunProgress,
    classify_exit,
    file_sizes,
    read_patiently,
    read_progress,
    shell_exit_code,
)
from pretrain.errors import CRASHED, FINISHED, NO_RESTART, STOPPED, ConfigError, counted
from pretrain.extensions.supervise.next_start import (
    HostChoice,
    PrintLine,
    SupervisorSettings,
    check_can_lose_hosts,
    choose_hosts,
    hosts_of_run,
    identity,
    newest_run_record,
    run_arguments,
    run_setting,
)
from pretrain.extensions.supervise.supervisor_files import RestartLog, StartRecord, SupervisorLock, rank_0_on_this_host
from pretrain.paths import STOP_FILE
from pretrain.resilience.run_lock import find_owner, reject_second_start, release_of_dead_owner
from pretrain.resilience.signals import describe

_POLL_S = 0.2
_ASK_TO_SAVE_AGAIN_S = 1.0  # time until the ranks are asked again, if none of them handled SIGUSR1 yet
_SIGTERM_GRACE_S = 10.0  # time between SIGTERM and SIGKILL


def supervise(settings: SupervisorSettings, print_line: PrintLine) -> int:
    """Run the command again and again, until the run has finished, is rejected, or makes no progress.

    Returns the exit code that train.py would have returned for the last start, or 75 if a signal stopped the
    supervisor. Raises ConfigError.
    """
    if settings.exclude_stragglers and settings.min_hosts is None:
        raise ConfigError("--exclude_stragglers", problem="this flag needs --min_hosts",
                          remedy="give --min_hosts N: the fewest hosts on which the run may continue")
    if settings.min_hosts is not None:
        if settings.hostfile is None:
            raise ConfigError("--min_hosts", problem="this flag needs a --hostfile")
        check_can_lose_hosts(settings.command)
    lock = SupervisorLock(settings.run)
    if not lock.command_runs:
        reject_second_start(settings.run)
        _reject_running_ranks(settings)
    log = RestartLog(settings.run)
    become_subreaper()
    args = read_patiently(settings.run, lambda: run_arguments(settings.command, settings.run),
                          otherwise=None)
    with around_run(args, "the supervisor"), SignalRecorder() as signals:
        try:
            code, outcome = _restart_until_done(settings, lock, log, signals, print_line)
        except ConfigError as error:
            log.close(f"rejected: {error}")
            raise
        row = log.close(outcome)
    print_line(f"{outcome}; {counted(row['starts'], 'start')}, step {row['last_step']}, goodput "
               f"{row['goodput']:.1%} ({row['productive_seconds']:.1f} s of kept steps in "
               f"{row['wall_seconds']:.1f} s)")
    return code


def _restart_until_done(settings: SupervisorSettings, lock: SupervisorLock, log: RestartLog, signals: SignalRecorder,
                        print_line: PrintLine) -> tuple[int, str]:
    """Start the run until no further start is needed or useful. Returns (exit code, why it was the last start).

    If the command of a killed supervisor still runs, that is the first start.
    """
    farthest_step, without_progress = _newest_step(settings, print_line, otherwise=0), 0
    while True:
        adopted = lock if lock.command_runs and not log.starts else None
        record = _start_once(settings, log, signals, print_line, adopted, known_step=farthest_step)
        log.add(record)
        if record.exit_code == FINISHED or record.exit_code in NO_RESTART:
            return record.exit_code or 0, record.reason
        if signals.name:
            return 128 + signals.ended_by if signals.ended_by else STOPPED, f"{signals.name}: {record.reason}"
        if read_patiently(settings.run, (settings.run / STOP_FILE).exists, otherwise=False, exists=True,
                          report=print_line):
            return shell_exit_code(record.exit_code), f"{record.reason}; no restart, because " \
                                                      f"{settings.run / STOP_FILE} exists"
        without_progress = 0 if record.last_step > farthest_step else without_progress + 1
        farthest_step = max(farthest_step, record.last_step)
        if without_progress > settings.max_restarts:
            return shell_exit_code(record.exit_code), f"{record.reason}; gave up after {settings.max_restarts} " \
                                                      f"restarts without a step beyond {farthest_step}"
        pause_s = backoff(settings, without_progress)
        print_line(f"{record.reason} at step {record.last_step}; restarting from step {record.kept_step} "
                   f"in {pause_s:g} s")
        if not _sleep(pause_s, signals):
            return STOPPED, f"{signals.name} between two starts"


def _newest_step(settings: SupervisorSettings, print_line: PrintLine, *, otherwise: int) -> int:
    """Return the step of the newest good checkpoint; `otherwise` if the run folder cannot be read."""
    return read_patiently(settings.run, lambda: newest_step(settings.run / "checkpoints"), otherwise=otherwise,
                          exists=True, report=print_line)


def backoff(settings: SupervisorSettings, without_progress: int) -> float:
    """Return the pause in seconds before the next start. `without_progress`: starts in a row without a new step."""
    return float(min(settings.backoff_s * 2 ** min(without_progress, 60), settings.backoff_max_s))


def _sleep(seconds: float, signals: SignalRecorder) -> bool:
    """Sleep until the time is over or a signal arrives. Returns False after a signal."""
    deadline = time.monotonic() + seconds
    while not signals.name and time.monotonic() < deadline:
        time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))
    return not signals.name


def _start_once(settings: SupervisorSettings, log: RestartLog, signals: SignalRecorder, print_line: PrintLine,
                adopted: SupervisorLock | None, *, known_step: int) -> StartRecord:
    """Check the hosts and run the command once. Returns the record for the log.

    Args:
        settings: the command, and where it runs.
        log: the earlier starts.
        signals: signals to this process.
        print_line: prints a line for the user.
        adopted: the lock with which the command of a killed supervisor runs: wait for that, instead of running another.
        known_step: step of the run, for the record if the run folder cannot be read.
    """
    began, began_monotonic = time.time(), time.monotonic()
    sizes_before = read_patiently(settings.run, lambda: file_sizes(settings.run), otherwise=None, exists=True,
                                  report=print_line)
    number = len(log.starts) + 1
    choice = _choose(settings, print_line, adopted, number)
    if adopted is not None:
        code = _wait_for_adopted_run(settings, adopted, signals, print_line)
    elif choice.obstacle or sizes_before is None or signals.name:
        otherwise = "the run folder cannot be read" if sizes_before is None else "not started"
        code, reason = None, choice.obstacle or otherwise
    else:
        step = _newest_step(settings, print_line, otherwise=known_step)
        print_line(f"start {number} from step {step}" + (f" on {', '.join(choice.hosts)}" if choice.hosts else ""))
        settings.before_start(number)
        if settings.exclude_stragglers:
            record_start(settings.run, choice.hosts, choice.left_out)
        code = _run_command(choice.command, settings, sizes_before, signals, print_line)
    progress = RunProgress([], [], known_step, known_step)
    if sizes_before is not None:
        progress = read_patiently(settings.run, lambda: read_progress(settings.run, sizes_before), exists=True,
                                  otherwise=progress, report=print_line)
    if code is not None:
        code, reason = classify_exit(code, progress, last_step=_planned_steps(settings))
    return StartRecord(time=began, start=number, exit_code=code, reason=reason, first_step=progress.first_step,
                       last_step=progress.last_step, kept_step=progress.kept_step, hosts=list(choice.hosts),
                       left_out={host: left_out.reason for host, left_out in choice.left_out.items()},
                       productive_seconds=log.productive_seconds(progress),
                       wall_seconds=time.monotonic() - began_monotonic)


def _choose(settings: SupervisorSettings, print_line: PrintLine, adopted: SupervisorLock | None,
            number: int) -> HostChoice:
    """Return the command and the hosts of a start, and why it cannot start now. `number`: of the start, from 1."""
    if adopted is not None:
        return HostChoice([])
    try:
        choice = choose_hosts(settings, print_line)
    except OSError as error:
        return HostChoice([], obstacle=f"{error.filename or settings.run} cannot be read or written ({error.strerror})")
    if number == 1 or choice.obstacle:
        return choice
    _end_remaining_ranks(settings)
    # For example, the previous start still trains on a host that cannot be reached: wait as for a bad host.
    owner = find_owner(settings.run)
    return replace(choice, obstacle=f"another start is training in the run folder ({owner})") if owner else choice


def _run_command(command: Sequence[str], settings: SupervisorSettings, sizes_before: dict[str, int],
                 signals: SignalRecorder, print_line: PrintLine) -> int:
    """Run the command until it has ended or a signal arrives, then end all remaining descendants.

    After a signal, and after the launcher was killed, the ranks first save. Returns the exit code.
    """
    try:
        # The command runs in a session of its own: otherwise Ctrl-C would reach the launcher, which ends the ranks.
        # It inherits the supervisor's lock (SupervisorLock): Python opens all other files as not inheritable.
        child = subprocess.Popen(list(command), start_new_session=True, close_fds=False)
    except OSError as error:
        raise ConfigError("command line", problem=f"{command[0]} cannot be started: {error.strerror}",
                          remedy="give a command that starts the run") from None
    try:
        code = wait_for_launcher(child, lambda: signals.name, grace_s=settings.grace_s)
        return _wait_for_save(child, settings, sizes_before, signals, print_line) if code is None else code
    finally:
        end_all(descendants, grace_s=_SIGTERM_GRACE_S)
        if signals.name:
            release_of_dead_owner(settings.run)


def _report_signals(signals: SignalRecorder, print_line: PrintLine) -> None:
    """Print a line about each new signal."""
    for number, ordinal in signals.take():
        # the ranks report what they do after the first one
        print_line(f"{signals.name}: asking the run to save and stop" if ordinal == 1 else describe(number, ordinal))


def _wait_for_adopted_run(settings: SupervisorSettings, lock: SupervisorLock, signals: SignalRecorder,
                          print_line: PrintLine) -> int:
    """Wait until the command of a killed supervisor and its ranks have ended. After a signal, the ranks first save.

    Returns the exit code, as far as it can be known: the files of the run have more.
    """
    print_line("an earlier supervisor was killed, and its run continues; waiting until the run ends")
    deadline = float("inf")
    while not lock.acquire() or find_owner(settings.run) is not None:
        _report_signals(signals, print_line)
        if signals.name and deadline == float("inf"):
            deadline = time.monotonic() + settings.grace_s
            if not ask_to_save(rank_0_on_this_host(settings.run)):
                _ranks_on_hosts(settings, "save")
        if signals.ended_by or time.monotonic() > deadline:
            end(rank_0_on_this_host(settings.run), grace_s=_SIGTERM_GRACE_S)
            _ranks_on_hosts(settings, "end")
            return STOPPED
        time.sleep(_POLL_S)
    return CRASHED


def _wait_for_save(child: subprocess.Popen[bytes], settings: SupervisorSettings, sizes_before: dict[str, int],
                   signals: SignalRecorder, print_line: PrintLine) -> int:
    """Ask the ranks on all hosts to save, and wait until they have ended. Returns the exit code.

    Returns 75 at once if no rank handles SIGUSR1 because training has not begun: then there is nothing to save.
    Also returns 75 after a third signal or when `grace_s` is over.
    """
    deadline = time.monotonic() + settings.grace_s
    asked: list[int] = []
    while time.monotonic() < deadline and not signals.ended_by:
        _report_signals(signals, print_line)
        # A rank may get two signals: from this process, and from its launcher. Two change no more than one.
        asked = asked or ask_to_save(descendants()) or [
            pid for pids in _ranks_on_hosts(settings, "save").values() for pid in pids]
        if not asked and not _began(settings, sizes_before):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_ASK_TO_SAVE_AGAIN_S)
        reap_orphans(child.pid)
    return STOPPED


def _began(settings: SupervisorSettings, sizes_before: dict[str, int]) -> bool:
    """Return whether training may have begun: also if the run folder cannot be read."""
    try:
        return read_progress(settings.run, sizes_before).began
    except OSError:
        return True


def _planned_steps(settings: SupervisorSettings) -> int | None:
    """Return the step at which the run is complete, or None if it is unknown.

    The step comes from --train_steps or, if the flags give tokens instead, from run.json. --exit_step can lower it.
    """
    record, given = newest_run_record(settings.run) or {}, dict[str, str | None]()
    with contextlib.suppress(ConfigError):  # the file of --config cannot be read now
        given = {name: run_setting(settings.command, name) for name in ("train_steps", "exit_step")}
    limits = [int(str(value)) for value in (given.get("train_steps") or record.get("train_steps"),
                                            given.get("exit_step")) if str(value).isdecimal()]
    return min(limits) if limits else None


def _ranks_on_hosts(settings: SupervisorSettings, action: str) -> dict[str, list[int]]:
    """Call `ranks_on` for all hosts of the hostfile, or for this host if there is no hostfile."""
    hosts = [LOCAL] if settings.hostfile is None else \
        read_patiently(settings.run, lambda: hosts_of_run(settings), otherwise=dict[str, int]())
    return ranks_on(hosts, action, identity(settings.command), settings.transport)


def _end_remaining_ranks(settings: SupervisorSettings) -> None:
    """End ranks of the previous start that still run on other hosts: after a lost network their launcher cannot."""
    if settings.hostfile is not None:
        _ranks_on_hosts(settings, "end")


def _reject_running_ranks(settings: SupervisorSettings) -> None:
    """Raise ConfigError if ranks of this run are already running."""
    for host, pids in _ranks_on_hosts(settings, "list").items():
        raise ConfigError(str(settings.run), problem=f"this run is already running on {host} "
                                                     f"(process {', '.join(map(str, pids))})",
                          remedy="wait until it ends, or end it")
