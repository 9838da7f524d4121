"""Inject random faults into a run: python -m tests.extensions.supervise.chaos [flags] -- COMMAND...

COMMAND is any command that starts pretrain/train.py on this host. It runs under the supervisor twice: without faults,
and with random faults.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.run_checkpoints import checkpoint_folders, newest_good
from pretrain.cli import LONGEST_SECONDS, Parser, number, run_main, text, whole_number
from pretrain.config.flags.parse import parse_arguments
from pretrain.data.data_spec import split_words
from pretrain.errors import FINISHED, REJECTED, ConfigError
from pretrain.extensions.supervise.next_start import hostfile_of, run_folder, train_flags, with_separator
from pretrain.extensions.supervise.supervisor import SupervisorSettings, supervise
from pretrain.extensions.supervise.supervisor_files import RESTART_LOG
from pretrain.monitor.read_run_folder import read_rows
from tests.extensions.supervise.chaos.damage import LinkedData
from tests.extensions.supervise.chaos.faults import KINDS, Schedule, make_schedule
from tests.extensions.supervise.chaos.hooks.sitecustomize import VARIABLE
from tests.extensions.supervise.chaos.injector import ChaosSettings, FaultInjector
from tests.extensions.supervise.chaos.processes import SIGNALS
from tests.extensions.supervise.chaos.results import ChaosResult, compared, count_by_kind, state_hash
from tests.extensions.supervise.chaos.watch import CheckpointLedger, RunWatch

RESULT = "chaos.json"
LONGEST_STEP_TIMEOUT_S = 60.0  # a longer one makes, each `hang` would take that long
_GRACE_S = 60.0  # time to save after a signal to this program
_FEWEST_STEPS = 8
_HOOKS = Path(__file__).parent / "hooks"


def parse(words: Sequence[str]) -> ChaosSettings:
    """Validate the flags and the command. Raises ConfigError."""
    end = words.index("--") if "--" in words else len(words)
    parser = Parser(prog="python -m tests.extensions.supervise.chaos", usage="%(prog)s [flags] -- COMMAND...",
                    description="Runs COMMAND twice under the supervisor, without faults and with random faults, and "
                                "compares losses and final weights. Never use the folder of a run that matters.",
                    epilog="Kinds of faults: " + "; ".join(f"{name}: {each.about}" for name, each in KINDS.items()))
    parser.add_argument("--faults", type=whole_number(1, 100_000), default=200, help="number of faults (default: 200)")
    parser.add_argument("--seed", type=whole_number(), default=0,
                        help="the same seed gives the same faults, as far as timing allows (default: 0)")
    parser.add_argument("--kinds", type=text, metavar="A,B", help="kinds of faults (default: all that are possible)")
    parser.add_argument("--stall_s", type=number(1, LONGEST_SECONDS), default=900.0,
                        help="end the run after this time in seconds without a step, start or fault (default: 900)")
    own, command = parser.parse_args(words[:end]), with_separator(words[end + 1:])
    run, args = run_folder(command, None), parse_arguments(train_flags(command))
    if hostfile_of(command, None) is not None:
        raise ConfigError("--hostfile", problem="faults are applied on this host only",
                          remedy="run the command on this host alone")
    steps = min(args.train_steps or 0, args.exit_step or LONGEST_SECONDS)
    if steps < max(own.faults, _FEWEST_STEPS):
        raise ConfigError("--faults", problem=f"{own.faults} faults need at least {max(own.faults, _FEWEST_STEPS)} "
                          f"steps, and the command has --train_steps {args.train_steps}",
                          remedy="choose fewer faults or more --train_steps")
    for folder in (run, run.with_name(f"{run.name}-reference")):
        if (folder / "run.json").exists() or checkpoint_folders(folder / "checkpoints"):
            raise ConfigError(f"--save {folder}", problem="this folder has a run already, and faults are not for runs "
                              "that matter", remedy="choose a new --save")
    can_hang = 0 < args.step_timeout <= LONGEST_STEP_TIMEOUT_S
    kinds = own.kinds.split(",") if own.kinds else [name for name in KINDS if can_hang or name != "hang"]
    for name in kinds:
        if name not in KINDS:
            raise ConfigError("--kinds", found=repr(name), expected=f"kinds among {', '.join(KINDS)}", word=name,
                              known=KINDS)
    if "hang" in kinds and not can_hang:
        raise ConfigError("--kinds hang", problem=f"the run's --step_timeout is {args.step_timeout:g} s, so each fault "
                          "of this kind would take that long", remedy=f"give the run a --step_timeout of at most "
                          f"{LONGEST_STEP_TIMEOUT_S:g}")
    train_data = next(iter(args.data.train), "")
    linked = run / "chaos" / "data" / Path(train_data).name
    data = [str(linked) if word == train_data else word for word in split_words(args.train_data)]
    # the last value of a flag counts
    return ChaosSettings(
        command=[*command, "--save", str(run), "--log_interval", "1",
                 *(["--train_data", *data] if "data" in kinds and data else [])],
        run=run, kinds=tuple(kinds), faults=own.faults, seed=own.seed, stall_s=own.stall_s, train_steps=int(steps),
        train_data=train_data, keep_checkpoints=args.keep_checkpoints, step_timeout=args.step_timeout)


def run_chaos(settings: ChaosSettings) -> ChaosResult:
    """Run the reference, then the run with faults; write RUN/chaos.json. Raises ConfigError."""
    for number_of_signal in SIGNALS:  # shells start background jobs with SIGINT ignored; the run must receive it
        if signal.getsignal(number_of_signal) == signal.SIG_IGN:
            signal.signal(number_of_signal, signal.SIG_DFL)
    schedule = make_schedule(settings.kinds, faults=settings.faults, seed=settings.seed,
                             train_steps=settings.train_steps)
    reference = settings.run.with_name(f"{settings.run.name}-reference")
    data = LinkedData(settings.train_data, settings.instructions) if "data" in settings.kinds else None
    print_line(f"reference run in {reference}")
    with _hooked_environment(reference / "chaos", schedule):
        code = supervise(SupervisorSettings([*settings.command, "--save", str(reference)], reference, max_restarts=0,
                                            grace_s=_GRACE_S), print_line)
    if code != FINISHED:
        raise ConfigError("reference run", problem=f"it ended with exit code {code} without any fault",
                          remedy=f"see the messages above; remove {reference} before the next try")
    result = _run_with_faults(settings, schedule, data, reference)
    record = {"ok": not result.problems(), "problems": result.problems(), "total": result.total, **asdict(result)}
    (settings.run / RESULT).write_text(json.dumps(record, indent=1, default=str), encoding="utf-8")
    return result


def print_line(line: str) -> None:
    print(f"chaos: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _hooked_environment(instructions: Path, schedule: Schedule) -> Iterator[None]:
    """Write the steps whose loss is NaN, and let the child processes follow the instructions in this folder."""
    instructions.mkdir(parents=True, exist_ok=True)
    (instructions / "bad_steps.json").write_text(json.dumps(schedule.bad_steps))
    before = os.environ.copy()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOOKS), before.get("PYTHONPATH")]))
    os.environ[VARIABLE] = str(instructions)
    try:
        yield
    finally:
        for name in ("PYTHONPATH", VARIABLE):
            del os.environ[name]
        os.environ.update(before)


def _run_with_faults(settings: ChaosSettings, schedule: Schedule, data: LinkedData | None,
                     reference: Path) -> ChaosResult:
    watch, ledger = RunWatch(settings.run), CheckpointLedger(settings.run, keep_checkpoints=settings.keep_checkpoints)
    injector = FaultInjector(settings, schedule, watch, ledger, data, print_line)
    supervisor = SupervisorSettings(settings.command, settings.run, max_restarts=2 * settings.faults + 5,
                                    backoff_s=0.0, grace_s=_GRACE_S, before_start=injector.before_start)
    with _hooked_environment(settings.instructions, schedule):
        injector.start()
        try:
            code = supervise(supervisor, print_line)
            while code == REJECTED and data is not None and data.restore():  # it was rejected for truncated data
                code = supervise(supervisor, print_line)
        finally:
            injector.finish()
            if data is not None:
                data.restore()
    starts = [row for row in read_rows(settings.run / RESTART_LOG) if "start" in row]
    rows, expected = watch.steps(), RunWatch(reference).steps()
    missing = {row["step"] for row in expected} - {row["step"] for row in rows}
    return ChaosResult(
        seed=settings.seed, exit_code=code, faults=injector.applied, planned=settings.faults, steps=len(expected),
        kinds=count_by_kind(injector.applied, [step for step, _ in schedule.bad_steps], starts, watch,
                            complete=code == FINISHED and not missing),
        missing_steps=len(missing), wrong_steps=sum(row not in compared(expected) for row in compared(rows)),
        lost=[*ledger.lost(), *_ignored_checkpoints(starts, injector.newest_intact)],
        hashes=(_final_hash(settings.run), _final_hash(reference)), failure=injector.failure, starts=starts)


def _ignored_checkpoints(starts: list[dict[str, Any]], newest_intact: list[int]) -> list[str]:
    """Return a line for each undamaged checkpoint that a start did not use, although it resumed from an older one."""
    return [f"checkpoint of step {step} is lost: start {number_of_start} resumed from step {start['first_step']}"
            for number_of_start, (start, step) in enumerate(zip(starts, newest_intact, strict=False), 1)
            if start["last_step"] > start["first_step"] and start["first_step"] < step]


def _final_hash(run: Path) -> str:
    """Return the hash of the newest checkpoint's weights and optimizer states; "none" if there is no checkpoint."""
    try:
        found = newest_good(run / "checkpoints")
    except ConfigError:
        return "none"
    return state_hash(found[0]) if found else "none"


def main() -> int:
    """Return 0 if the run ended like a run without faults and nothing was lost, and 1 otherwise. Raises ConfigError."""
    settings = parse(sys.argv[1:])
    result = run_chaos(settings)
    print(*result.lines(), f"details: {settings.run / RESULT}", sep="\n")
    return 1 if result.problems() else 0


if __name__ == "__main__":
    run_main(main)
