"""Validate flags that depend on nothing else: ranges, choices, the run folder, the mirror; names of --override."""

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from pretrain.active_extensions import check_extensions, run_files
from pretrain.cli import chosen
from pretrain.config.flags.arguments import FLAGS, LONGEST_NOTE, OVERRIDES, RunArguments
from pretrain.config.schedule import FIELD_OF_FLAG, KINDS
from pretrain.errors import ConfigError, shorten
from pretrain.paths import check_folder, check_outside_runs
from pretrain.remote import check_protocol, is_url

# flags whose values a checkpoint records -> the name that allows another value
RECIPE_FLAGS = {name: flag.override for name, flag in FLAGS.items() if flag.override}

# entry of run.json, of the manifest and of the event "override"
OverrideRecord = TypedDict("OverrideRecord", {"step": int, "name": str, "setting": str, "from": Any, "to": Any})


@dataclass(frozen=True)
class Change:
    """A setting that differs between a checkpoint and the run that continues from it."""

    name: str  # of --override; "": no name allows it
    setting: str
    before: Any  # in the checkpoint
    now: Any

    def record(self, step: int) -> OverrideRecord:
        """Return the entry about a change after `step`."""
        return {"step": step, "name": self.name, "setting": self.setting, "from": self.before, "to": self.now}


def named_overrides(args: RunArguments) -> frozenset[str]:
    """Return the names that --override and --allow_other_data give. Raises ConfigError for an unknown name."""
    words = chosen("--override", args.override or [], list(OVERRIDES))
    return frozenset(words) | ({"data"} if args.allow_other_data else frozenset())


def allows_other_data(args: RunArguments) -> bool:
    """Return whether the run may train on other data than its checkpoint."""
    return "data" in named_overrides(args)


def check_flags(args: RunArguments) -> None:
    """Raise ConfigError for values out of range, unknown choices, and flags without an effect."""
    for name, flag in FLAGS.items():
        flag.check(name, args.value(name))
    if args.label_smoothing == 1:
        raise ConfigError("--label_smoothing", found=1, expected="below 1: with 1, the labels have no effect")
    for name in ("step_timeout", "first_step_timeout"):
        if 0 < getattr(args, name) < 1:
            raise ConfigError(f"--{name}", found=getattr(args, name), expected="at least 1 s, or 0 for no limit")
    if len(args.note or "") > LONGEST_NOTE:
        raise ConfigError("--note", found=f"{len(args.note or '')} characters", expected=f"at most {LONGEST_NOTE}")
    _check_schedule_flags(args)
    _check_checkpoint_flags(args)
    _check_steering_flags(args)
    if args.skip_samples is not None or args.reorder_samples is not None:
        from pretrain.data.samples.read_order import read_order  # imports numpy

        read_order(args.skip_samples, args.reorder_samples, args.first_sample)
    check_extensions(args)
    if args.order_samples is not None and args.sample_order == "shuffled":
        raise ConfigError("--order_samples", found=f"{args.order_samples} with --sample_order shuffled",
                          expected="no value", remedy="the default order does not depend on a number of samples")
    if (args.train_steps is None) == (args.train_tokens is None):
        raise ConfigError("--train_steps / --train_tokens", expected="one of the two",
                          found="neither of them" if args.train_steps is None else "both")


def _check_schedule_flags(flags: RunArguments) -> None:
    """Reject --lr_* flags that give twice the same setting, and flags without an effect."""
    given = [name for name in FIELD_OF_FLAG if getattr(flags, name) is not None]
    for first, second in itertools.combinations(given, 2):
        if FIELD_OF_FLAG[first] == FIELD_OF_FLAG[second]:
            raise ConfigError(f"--{first} / --{second}", found="both", expected="one of the two")
    kinds_of = {name: [kind for kind, row in KINDS.items() if name in row.flags] for name in FIELD_OF_FLAG}
    for name in given:
        kinds = kinds_of[name]
        if kinds and flags.lr_schedule not in kinds:
            raise ConfigError(f"--{name}", found=f"{getattr(flags, name)} with --lr_schedule {flags.lr_schedule}",
                              expected="no value", remedy=f"it has an effect on {', '.join(kinds)} only")
    if flags.lr_schedule in kinds_of["lr_milestones"] and flags.lr_milestones is None and \
            flags.lr_milestone_tokens is None:
        raise ConfigError("--lr_milestones",
                          problem=f"the flag is missing, and --lr_schedule {flags.lr_schedule} needs it",
                          remedy="give the numbers of steps after which the rate falls, such as 8000,9000")
    if (flags.lr_reference_batch is None) != (flags.lr_scaling is None):
        alone, missing = "lr_reference_batch", "lr_scaling"
        if flags.lr_reference_batch is None:
            alone, missing = missing, alone
        raise ConfigError(f"--{alone}", problem=f"it has no effect without --{missing}", remedy=f"give --{missing}, "
                          "or leave both out")


def _check_checkpoint_flags(args: RunArguments) -> None:
    """Reject flags without an effect, and a --keep_checkpoints that leaves no older checkpoint to fall back to."""
    if args.keep_checkpoints == 1:
        raise ConfigError("--keep_checkpoints", found=1, expected="at least 2, or 0 for all",
                          remedy="the newest one may be damaged")
    for name in ("keep_every", "keep_best"):
        if getattr(args, name) and not args.keep_checkpoints:
            raise ConfigError(f"--{name}", found=getattr(args, name), expected="0, as all checkpoints are kept",
                              remedy="add --keep_checkpoints N")
    if args.keep_best and not args.eval_interval:
        raise ConfigError("--keep_best", found=args.keep_best, expected="0 without evaluations",
                          remedy="give --eval_interval, a divisor of --save_interval")
    if args.save_busy != "wait" and not args.async_save:
        raise ConfigError("--save_busy", found=args.save_busy, expected="wait, for saves that training waits for",
                          remedy="add --async_save")


def _check_steering_flags(args: RunArguments) -> None:
    named_overrides(args)
    if args.resume_from is not None and args.init_from is not None:
        raise ConfigError("--resume_from", found=f"also --init_from {args.init_from}", expected="one of the two",
                          remedy="--resume_from continues a run with its optimizer states; --init_from takes weights "
                          "alone, and begins at step 0")


def check_folders(save: str, mirror: str | None) -> None:
    """Raise ConfigError unless the run folder and the mirror can be written to."""
    if not save:
        raise ConfigError("--save", problem="the flag is required: the run folder, which is made if it does not exist")
    if not save.isprintable():
        raise ConfigError("--save", found=repr(save), expected="a path without line breaks and control characters")
    if is_url(save):
        raise ConfigError("--save", found=f"the URL {shorten(save)}", expected="a folder on a disk",
                          remedy="--checkpoint_mirror copies the checkpoints to a URL")
    if re.search(r"\$[{(A-Za-z_]", save):
        raise ConfigError("--save", problem=f"{shorten(save)} has a shell variable that nothing replaces here",
                          remedy="write the path itself")
    check_folder(Path(save), "--save")
    check_outside_runs(Path(save), "--save")
    check_folder(Path(save) / "checkpoints", "--save")
    for name in run_files():
        path = Path(save) / name
        if os.path.lexists(path) and not path.is_file():
            raise ConfigError("--save", problem=f"{shorten(str(path))} is not a regular file",
                              remedy="remove it, or choose another folder")
    if mirror is not None:
        _check_mirror(mirror, save)


def _check_mirror(mirror: str, save: str) -> None:
    """Raise ConfigError for a malformed URL, a URL whose package is not installed, or a folder that is not writable.

    The folder is not checked if the run has a checkpoint: such a run resumes without the mirror. The server of a URL is
    not contacted here; rank 0 does so later.
    """
    protocol, separator, _ = mirror.partition("://")
    local = not separator or protocol in ("file", "local")
    if separator and not protocol:
        raise ConfigError("--checkpoint_mirror", found=mirror, expected="a folder, or a URL such as s3://bucket/run")
    if not local:
        check_protocol(mirror, "--checkpoint_mirror")
        return
    folder, run = (Path(os.path.realpath(name)) for name in (mirror.partition("://")[2] if separator else mirror, save))
    if folder == run or run in folder.parents:
        raise ConfigError("--checkpoint_mirror", problem=f"{folder} lies in the run folder (--save {save})",
                          remedy="choose a folder elsewhere: this copy would be lost with the run folder")
    if not any(Path(save, "checkpoints").glob("global_step*")):
        check_folder(folder, "--checkpoint_mirror")
