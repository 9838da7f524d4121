"""Validated settings of tools/chaos.py. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.chaos.instructions import folder_of, read_bad_steps
from pretrain.chaos.kinds import CHECKPOINT_DAMAGE, KINDS
from pretrain.checkpoint.format.manifest import checkpoint_folders
from pretrain.cluster.supervise.launch_command import hostfile_of, identity, run_folder, train_flags
from pretrain.config.flags.arguments import RunArguments, data_spec
from pretrain.config.flags.parse import parse_arguments
from pretrain.data.data_spec import split_words
from pretrain.errors import ConfigError

LONGEST_STEP_TIMEOUT_S = 60.0  # with a longer --step_timeout, each `hang` would take that long
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class ChaosSettings:
    """Commands and run folders of a chaos run, and its faults."""

    command: list[str]  # of the run with faults
    run: Path
    reference_command: list[str] | None  # of the fault-free run; None: it has been run before
    reference: Path
    kinds: tuple[str, ...]
    faults: int
    seed: int
    stall_s: float  # without a step, a start or a fault in this time, the run is ended
    train_steps: int
    train_data: str  # the first prefix
    keep_checkpoints: int
    step_timeout: float

    @property
    def data_prefix(self) -> Path:
        """Prefix of the links to the training data; of a blend, to its first source."""
        return folder_of(self.run) / "data" / Path(self.train_data).name


def make_settings(command: Sequence[str], *, kinds: str | None, faults: int, seed: int, reference: str | None,
                  stall_s: float) -> ChaosSettings:
    """Validate the flags and the command. Raises ConfigError."""
    if not command:
        raise ConfigError("command line", problem="COMMAND is missing",
                          remedy="write `tools/chaos.py [flags] -- COMMAND...`")
    if not identity(command):
        raise ConfigError("command line", problem="the flags of pretrain/train.py are not in the command",
                          remedy="give a command such as `ds-pretrain --num_gpus 2 --config run.yaml --save RUN`")
    if (hostfile := hostfile_of(command, None)) is not None:
        raise ConfigError("--hostfile", problem=f"{hostfile} is given, but faults are applied on this host only",
                          remedy="run the command on this host alone")
    args = parse_arguments(train_flags(command))
    run = run_folder(command, None)
    chosen = _chosen_kinds(kinds, args, run)
    steps = _train_steps(args, faults)
    _reject_used_folder("--save", run)
    other = Path(reference).absolute() if reference else run.with_name(f"{run.name}-reference")
    if reference is None:
        _reject_used_folder("--save", other)
    elif read_bad_steps(other) is None:
        raise ConfigError("--reference", problem=f"{other} is not a reference that this tool has made",
                          remedy="leave --reference out: the tool then runs the reference itself")
    settings = ChaosSettings(
        command=[], run=run, reference_command=None if reference else _command(command, other), reference=other,
        kinds=chosen, faults=faults, seed=seed, stall_s=stall_s, train_steps=steps,
        train_data=next(iter(data_spec(args).train), ""),
        keep_checkpoints=args.keep_checkpoints, step_timeout=args.step_timeout)
    words = [str(settings.data_prefix) if word == settings.train_data else word for word in
             split_words(args.train_data)]
    links = ["--train_data", *words] if "data" in chosen and words else []
    return ChaosSettings(**{**vars(settings), "command": [*_command(command, run), *links]})


def _command(command: Sequence[str], run: Path) -> list[str]:
    """Return the command with another run folder, and a row for each step. The last value of a flag counts."""
    return [*command, "--save", str(run), "--log_interval", "1"]


def _chosen_kinds(words: str | None, args: RunArguments, run: Path) -> tuple[str, ...]:
    """Return the kinds of faults, in the order of KINDS. Without --kinds: all that this run can have."""
    if words is None:
        impossible = [] if 0 < args.step_timeout <= LONGEST_STEP_TIMEOUT_S else ["hang"]
        return tuple(name for name in KINDS if name not in impossible)
    chosen = list(dict.fromkeys(words.split(",")))
    for name in chosen:
        if name not in KINDS:
            raise ConfigError("--kinds", found=repr(name), expected=f"kinds among {', '.join(KINDS)}", word=name,
                              known=KINDS)
    if "hang" in chosen and not 0 < args.step_timeout <= LONGEST_STEP_TIMEOUT_S:
        raise ConfigError("--kinds hang", problem=f"the run's --step_timeout is {args.step_timeout:g} s, so each fault "
                          "of this kind would take that long", remedy=f"give the run a --step_timeout of at most "
                          f"{LONGEST_STEP_TIMEOUT_S:g}")
    effects = {KINDS[name].effect for name in chosen}
    if "damages" in effects and "ends" not in effects:
        damaging = next(name for name in chosen if KINDS[name].effect == "damages")
        raise ConfigError(f"--kinds {words}", problem=f"{damaging} shows at the next start only, and no kind ends one",
                          remedy="add kill_rank")
    if any(name in CHECKPOINT_DAMAGE for name in chosen) and args.save_interval == 0:
        raise ConfigError("--save_interval", problem="the run saves at its end only, so there is no checkpoint to "
                          "damage", remedy="give the run a --save_interval")
    return tuple(name for name in KINDS if name in chosen)


def _train_steps(args: RunArguments, faults: int) -> int:
    limits = [value for value in (args.train_steps, args.exit_step) if value is not None]
    if not limits:
        raise ConfigError("--train_steps", problem="the command does not have it, and the faults are spread over the "
                          "steps", remedy="give --train_steps instead of --train_tokens")
    steps = min(limits)
    if steps < max(faults, _FEWEST_STEPS):
        raise ConfigError("--faults", problem=f"{faults} faults need at least {max(faults, _FEWEST_STEPS)} steps, and "
                          f"the run has {steps}", remedy="choose fewer faults or more --train_steps")
    return steps


def _reject_used_folder(flag: str, run: Path) -> None:
    """Raise ConfigError if the folder has a run already."""
    if (run / "run.json").exists() or checkpoint_folders(run / "checkpoints"):
        raise ConfigError(f"{flag} {run}", problem="this folder has a run already, and faults are not for runs that "
                          "matter", remedy="choose a new --save"
                          + ("; --reference uses an earlier reference" if run.name.endswith("-reference") else ""))
