"""Run the reference and the run with faults under the supervisor, and compare them."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.run_checkpoints import checkpoint_folders, newest_good
from pretrain.cluster.supervise.launch_command import hostfile_of, run_folder, train_flags
from pretrain.cluster.supervise.supervisor import SupervisorSettings, supervise
from pretrain.cluster.supervise.supervisor_files import RESTART_LOG
from pretrain.config.flags.arguments import RunArguments, data_spec
from pretrain.config.flags.parse import parse_arguments
from pretrain.data.data_spec import split_words
from pretrain.errors import FINISHED, REJECTED, ConfigError
from pretrain.monitor.read_run_folder import read_rows
from tests.chaos.checkpoints import CheckpointLedger, LostCheckpoint
from tests.chaos.damage import LinkedData
from tests.chaos.faults import KINDS, BadStep, Schedule, make_schedule
from tests.chaos.hooks.sitecustomize import VARIABLE
from tests.chaos.injector import FaultInjector
from tests.chaos.processes import SIGNALS
from tests.chaos.results import ChaosResult, count_by_kind, reference_rows, state_hash, steps_lost, wrong_rows
from tests.chaos.watch import RunWatch

RESULT = "chaos.json"
LONGEST_STEP_TIMEOUT_S = 60.0  # with a longer --step_timeout, each `hang` would take that long
_GRACE_S = 60.0  # time to save after a signal to this program
_FEWEST_STEPS = 8
_HOOKS = Path(__file__).parent / "hooks"
PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class ChaosSettings:
    """Commands and run folders of the two runs, and the faults."""

    command: list[str]  # of the run with faults
    run: Path
    reference_command: list[str]
    reference: Path
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


def make_settings(command: Sequence[str], *, kinds: str | None, faults: int, seed: int,
                  stall_s: float) -> ChaosSettings:
    """Validate the flags and the command. Raises ConfigError."""
    args, run = parse_arguments(train_flags(command)), run_folder(command, None)
    if hostfile_of(command, None) is not None:
        raise ConfigError("--hostfile", problem="faults are applied on this host only",
                          remedy="run the command on this host alone")
    if args.train_steps is None:
        raise ConfigError("--train_steps", problem="the command needs this flag, to choose steps for the faults")
    steps = min(args.train_steps, args.exit_step or args.train_steps)
    if steps < max(faults, _FEWEST_STEPS):
        raise ConfigError("--faults", problem=f"{faults} faults need at least {max(faults, _FEWEST_STEPS)} steps, and "
                          f"the command has --train_steps {steps}", remedy="choose fewer faults or more --train_steps")
    reference = run.with_name(f"{run.name}-reference")
    for folder in (run, reference):
        if (folder / "run.json").exists() or checkpoint_folders(folder / "checkpoints"):
            raise ConfigError(f"--save {folder}", problem="this folder has a run already, and faults are not for runs "
                              "that matter", remedy="choose a new --save")
    chosen = _chosen_kinds(kinds, args)
    train_data = next(iter(data_spec(args).train), "")
    linked = run / "chaos" / "data" / Path(train_data).name
    words = [str(linked) if word == train_data else word for word in split_words(args.train_data)]
    # the last value of a flag counts
    return ChaosSettings(
        command=[*command, "--save", str(run), "--log_interval", "1",
                 *(["--train_data", *words] if "data" in chosen and words else [])],
        run=run, reference_command=[*command, "--save", str(reference), "--log_interval", "1"], reference=reference,
        kinds=chosen, faults=faults, seed=seed, stall_s=stall_s, train_steps=steps, train_data=train_data,
        keep_checkpoints=args.keep_checkpoints, step_timeout=args.step_timeout)


def _chosen_kinds(words: str | None, args: RunArguments) -> tuple[str, ...]:
    """Return the kinds of faults, in the order of KINDS. Without --kinds: all that this run can have."""
    can_hang = 0 < args.step_timeout <= LONGEST_STEP_TIMEOUT_S
    if words is None:
        return tuple(name for name in KINDS if can_hang or name != "hang")
    chosen = words.split(",")
    for name in chosen:
        if name not in KINDS:
            raise ConfigError("--kinds", found=repr(name), expected=f"kinds among {', '.join(KINDS)}", word=name,
                              known=KINDS)
    if "hang" in chosen and not can_hang:
        raise ConfigError("--kinds hang", problem=f"the run's --step_timeout is {args.step_timeout:g} s, so each fault "
                          "of this kind would take that long", remedy=f"give the run a --step_timeout of at most "
                          f"{LONGEST_STEP_TIMEOUT_S:g}")
    return tuple(name for name in KINDS if name in chosen)


def run_chaos(settings: ChaosSettings, print_line: PrintLine) -> ChaosResult:
    """Run the reference, then the run with faults; write RUN/chaos.json. Raises ConfigError."""
    for number in SIGNALS:  # shells start background jobs with SIGINT ignored; the run must receive it
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    schedule = make_schedule(settings.kinds, faults=settings.faults, seed=settings.seed,
                             train_steps=settings.train_steps)
    print_line(f"reference run in {settings.reference}")
    with _hooked_environment(settings.reference / "chaos", schedule.bad_steps):
        code = supervise(SupervisorSettings(settings.reference_command, settings.reference, max_restarts=0,
                                            grace_s=_GRACE_S), print_line)
    if code != FINISHED:
        raise ConfigError("reference run", problem=f"it ended with exit code {code} without any fault",
                          remedy=f"see the messages above; remove {settings.reference} before the next try")
    result = _run_with_faults(settings, schedule, print_line)
    (settings.run / RESULT).write_text(json.dumps(result.to_json(), indent=1, default=str), encoding="utf-8")
    return result


@contextlib.contextmanager
def _hooked_environment(instructions: Path, bad_steps: Sequence[BadStep]) -> Iterator[None]:
    """Write the steps whose loss is NaN, and let the child processes follow the instructions in this folder."""
    instructions.mkdir(parents=True, exist_ok=True)
    (instructions / "bad_steps.json").write_text(json.dumps([[bad.step, bad.rank] for bad in bad_steps]))
    before = os.environ.copy()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOOKS), before.get("PYTHONPATH")]))
    os.environ[VARIABLE] = str(instructions)
    try:
        yield
    finally:
        for name in ("PYTHONPATH", VARIABLE):
            del os.environ[name]
        os.environ.update(before)


def _run_with_faults(settings: ChaosSettings, schedule: Schedule, print_line: PrintLine) -> ChaosResult:
    data = LinkedData(settings.train_data, settings.instructions) if "data" in settings.kinds else None
    watch, ledger = RunWatch(settings.run), CheckpointLedger(settings.run, keep_checkpoints=settings.keep_checkpoints)
    injector = FaultInjector(settings, schedule, watch, ledger, data, print_line)
    supervisor = SupervisorSettings(settings.command, settings.run, max_restarts=2 * settings.faults + 5,
                                    backoff_s=0.0, grace_s=_GRACE_S, before_start=injector.before_start)
    with _hooked_environment(settings.instructions, schedule.bad_steps):
        injector.start()
        try:
            code = supervise(supervisor, print_line)
            while code == REJECTED and data is not None and data.restore():  # it was rejected for truncated data
                code = supervise(supervisor, print_line)
        finally:
            injector.finish()
            if data is not None:
                data.restore()
    return _compare(settings, schedule, injector, watch, ledger, code)


def _compare(settings: ChaosSettings, schedule: Schedule, injector: FaultInjector, watch: RunWatch,
             ledger: CheckpointLedger, code: int) -> ChaosResult:
    starts = [row for row in read_rows(settings.run / RESTART_LOG) if "start" in row]
    reference, rows = reference_rows(settings.reference), watch.steps()
    missing = reference.keys() - {row.values["step"] for row in rows}
    kinds = count_by_kind(injector.applied, [bad.step for bad in schedule.bad_steps], starts, watch,
                          complete=code == FINISHED and not missing)
    return ChaosResult(
        seed=settings.seed, exit_code=code, kinds=kinds, faults=injector.applied, planned=settings.faults,
        steps=len(reference), missing_steps=len(missing), steps_lost=steps_lost(watch),
        wrong_steps=len(wrong_rows(rows, reference)),
        lost=[*ledger.lost(), *_ignored_checkpoints(starts, injector.newest_intact)],
        goodput=rows[-1].values.get("goodput") if rows else None,
        hashes=(_final_hash(settings.run), _final_hash(settings.reference)), failure=injector.failure, starts=starts)


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
