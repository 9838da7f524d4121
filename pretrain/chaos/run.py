"""Run the reference and the run with faults under the supervisor, and compare them."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.chaos import instructions
from pretrain.chaos.checkpoints import CheckpointLedger, LostCheckpoint
from pretrain.chaos.compare import reference_rows, state_hash, wrong_rows
from pretrain.chaos.damage import LinkedData
from pretrain.chaos.injector import FaultInjector
from pretrain.chaos.processes import SIGNALS
from pretrain.chaos.results import ChaosResult, count_bad_steps, count_by_kind, measure_goodput
from pretrain.chaos.schedule import Schedule, make_schedule
from pretrain.chaos.settings import ChaosSettings
from pretrain.chaos.watch import RunWatch
from pretrain.checkpoint.format.manifest import newest_good
from pretrain.cluster.supervise.restart_log import RESTART_LOG
from pretrain.cluster.supervise.supervisor import SupervisorSettings, supervise
from pretrain.errors import FINISHED, REJECTED, ConfigError
from pretrain.monitor.read_run_folder import read_rows

RESULT = "chaos.json"
_GRACE_S = 60.0  # time to save after a signal to this tool
PrintLine = Callable[[str], None]


def run_chaos(settings: ChaosSettings, print_line: PrintLine) -> ChaosResult:
    """Run the reference, then the run with faults; write RUN/chaos.json. Raises ConfigError."""
    _stop_ignoring_signals()
    schedule = make_schedule(settings.kinds, faults=settings.faults, seed=settings.seed,
                             train_steps=settings.train_steps)
    if settings.reference_command is not None:
        _run_reference(settings, schedule, print_line)
    elif instructions.read_bad_steps(settings.reference) != schedule.bad_steps:
        raise ConfigError("--reference", problem=f"{settings.reference} has other batches with a loss of NaN",
                          remedy="use the same --seed, --kinds and --faults, or leave --reference out")
    result = _run_with_faults(settings, schedule, print_line)
    (settings.run / RESULT).write_text(json.dumps(result.to_json(), indent=1, default=str), encoding="utf-8")
    return result


def _stop_ignoring_signals() -> None:
    """Let the run receive the signals that the faults send. Shells start background jobs with SIGINT ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _run_reference(settings: ChaosSettings, schedule: Schedule, print_line: PrintLine) -> None:
    """Run the command without faults, except for the bad steps. Raises ConfigError if it does not finish."""
    assert settings.reference_command is not None
    print_line(f"reference run in {settings.reference}")
    instructions.write_bad_steps(settings.reference, schedule.bad_steps)
    with instructions.hooked_environment(settings.reference):
        code = supervise(SupervisorSettings(settings.reference_command, settings.reference, max_restarts=0,
                                            grace_s=_GRACE_S), print_line)
    if code != FINISHED:
        raise ConfigError("reference run", problem=f"it ended with exit code {code} without any fault",
                          remedy=f"see the messages above; remove {settings.reference} before the next try")


def _run_with_faults(settings: ChaosSettings, schedule: Schedule, print_line: PrintLine) -> ChaosResult:
    instructions.write_bad_steps(settings.run, schedule.bad_steps)
    data = LinkedData(settings.train_data, instructions.folder_of(settings.run)) if "data" in settings.kinds else None
    watch, ledger = RunWatch(settings.run), CheckpointLedger(settings.run, keep_checkpoints=settings.keep_checkpoints)
    injector = FaultInjector(settings, schedule, watch, ledger, data, print_line)
    supervisor = SupervisorSettings(settings.command, settings.run, max_restarts=2 * settings.faults + 5,
                                    backoff_s=0.0, grace_s=_GRACE_S, before_start=injector.before_start)
    injector.start()
    try:
        with instructions.hooked_environment(settings.run):
            code = supervise(supervisor, print_line)
            while code == REJECTED and injector.after_rejection():
                code = supervise(supervisor, print_line)
    finally:
        injector.finish()
        if data is not None:
            data.restore()
    return _compare(settings, schedule, injector, watch, ledger, code)


def _compare(settings: ChaosSettings, schedule: Schedule, injector: FaultInjector, watch: RunWatch,
             ledger: CheckpointLedger, code: int) -> ChaosResult:
    starts = [row for row in read_rows(settings.run / RESTART_LOG) if "start" in row]
    reference = reference_rows(settings.reference)
    missing = reference.keys() - {row.values["step"] for row in watch.steps()}
    lost = [*ledger.lost(), *_ignored_checkpoints(starts, injector.newest_intact)]
    kinds = count_by_kind(injector.applied, starts, watch, wrong_rows(watch.steps(), reference),
                          [(ledger.last_seen(each.step), each) for each in lost],
                          complete=code == FINISHED and not missing)
    count_bad_steps(kinds, [bad.step for bad in schedule.bad_steps], watch)
    return ChaosResult(
        seed=settings.seed, exit_code=code, kinds=kinds, faults=injector.applied, planned=settings.faults,
        goodput=measure_goodput(starts, injector.applied, watch), steps=len(reference), missing_steps=len(missing),
        lost=lost, hashes=(_final_hash(settings.run), _final_hash(settings.reference)), failure=injector.failure,
        starts=starts)


def _ignored_checkpoints(starts: list[dict[str, Any]], newest_intact: list[int]) -> list[LostCheckpoint]:
    """Return the undamaged checkpoints that a start did not use, although it resumed from an older one."""
    return [LostCheckpoint(step, 0, f"start {number} resumed from step {start['first_step']}")
            for number, (start, step) in enumerate(zip(starts, newest_intact, strict=False), 1)
            if start["last_step"] > start["first_step"] and start["first_step"] < step]


def _final_hash(run: Path) -> str:
    """Return the hash of the newest checkpoint's weights and optimizer states; "none" if there is no checkpoint."""
    try:
        found = newest_good(run / "checkpoints")
    except ConfigError:
        return "none"
    return state_hash(found[0]) if found else "none"
