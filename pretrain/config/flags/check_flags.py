"""Validate flags that depend on nothing else: ranges, choices, the run folder and the mirror."""

import math
import os
import re
from pathlib import Path

from pretrain.cli import LONGEST_SECONDS
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.check_schedule import check_schedule_flags
from pretrain.config.flags.overrides import named_overrides
from pretrain.config.schedules.scaling import LR_SCALINGS
from pretrain.config.schedules.schedule import DECAY_SHAPES, KINDS
from pretrain.errors import ConfigError, shorten
from pretrain.model.init_methods import INIT_METHODS
from pretrain.model.recompute import PARTS
from pretrain.paths import RUN_FILES, check_folder, check_outside_runs

RESUME_CHOICES = ("auto", "required", "never")
SAVE_BUSY_CHOICES = ("wait", "skip")
SPIKE_POLICIES = ("warn", "skip", "rollback")
LOG_LEVELS = ("debug", "info", "warning", "error")

_SHORTEST_SPIKE_WINDOW = 16  # steps; fewer give no standard deviation
_AT_LEAST_ONE = ("seq_length", "log_interval", "eval_steps", "micro_batch_size", "gradient_accumulation_steps",
                 "global_batch_size", "train_steps", "train_tokens", "mup_base_width", "max_bad_steps", "order_samples",
                 "adaptive_clipping_window", "recompute_every", "mlp_tiles",
                 "lr_reference_batch")
_AT_LEAST_ZERO = ("eval_interval", "save_interval", "seed", "keep_checkpoints", "keep_every", "keep_best",
                  "lr_warmup_steps", "lr_decay_steps", "lr_wsd_steps", "lr_warmup_tokens", "lr_decay_tokens",
                  "lr_wsd_tokens", "min_lr", "weight_decay", "adam_epsilon",
                  "gradient_clipping", "rollback_skip_steps", "max_rollbacks", "step_timeout", "first_step_timeout",
                  "replica_check_interval", "first_sample", "label_smoothing", "z_loss",
                  "router_aux_loss", "router_z_loss", "expert_capacity_factor",
                  "gradient_value_clipping", "adaptive_clipping", "noise_scale_interval",
                  "early_stopping_patience", "early_stopping_min_delta")
_ABOVE_ZERO = ("exit_step", "save_timeout", "learning_rate", "peak_tflops", "init_std",
               "exit_after_minutes", "spike_threshold")
_AT_MOST = {"adam_epsilon": 1, "weight_decay": 1e3, "learning_rate": 1e3, "peak_tflops": 1e6,
            "save_timeout": LONGEST_SECONDS, "seed": 2**31 - 1, "init_std": 1e3, "step_timeout": LONGEST_SECONDS,
            "first_step_timeout": LONGEST_SECONDS, "exit_after_minutes": LONGEST_SECONDS / 60, "spike_threshold": 1e6,
            "spike_window": 2**20, "label_smoothing": 1, "z_loss": 1,
            "router_aux_loss": 1e3, "router_z_loss": 1e3, "expert_capacity_factor": 1e6,
            "gradient_value_clipping": 1e6, "adaptive_clipping": 100, "adaptive_clipping_window": 10_000,
            "first_sample": 2**48, "order_samples": 2**48}
_CHOICES = {"resume": RESUME_CHOICES, "save_busy": SAVE_BUSY_CHOICES, "spike_policy": SPIKE_POLICIES,
            "deepspeed_log_level": LOG_LEVELS,
            "lr_schedule": KINDS, "lr_decay_shape": DECAY_SHAPES, "lr_scaling": LR_SCALINGS, "recompute": PARTS,
            "init_method": INIT_METHODS, "output_init_method": INIT_METHODS}


def check_flags(args: RunArguments) -> None:
    """Raise ConfigError for values out of range, unknown choices, and flags without an effect."""
    _check_ranges(args)
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value is not None and value not in choices:
            raise ConfigError(f"--{name}", found=value, expected=", ".join(choices), word=value, known=choices)
    check_schedule_flags(args)
    _check_checkpoint_flags(args)
    _check_steering_flags(args)
    if args.order_samples is not None and args.sample_order == "shuffled":
        raise ConfigError("--order_samples", found=f"{args.order_samples} with --sample_order shuffled",
                          expected="no value", remedy="the default order does not depend on a number of samples")
    if (args.train_steps is None) == (args.train_tokens is None):
        raise ConfigError("--train_steps / --train_tokens", expected="one of the two",
                          found="neither of them" if args.train_steps is None else "both")


def _check_ranges(args: RunArguments) -> None:
    if args.spike_window < _SHORTEST_SPIKE_WINDOW:
        raise ConfigError("--spike_window", found=args.spike_window, expected=f"at least {_SHORTEST_SPIKE_WINDOW}")
    for name in ("step_timeout", "first_step_timeout"):
        if 0 < getattr(args, name) < 1:
            raise ConfigError(f"--{name}", found=getattr(args, name), expected="at least 1 s, or 0 for no limit")
    for names, low, above in ((_AT_LEAST_ONE, 1, False), (_AT_LEAST_ZERO, 0, False), (_ABOVE_ZERO, 0, True)):
        for name in names:
            value = getattr(args, name)
            if value is not None and not (math.isfinite(value) and (value > low if above else value >= low)):
                raise ConfigError(f"--{name}", found=value, expected=f"{'above' if above else 'at least'} {low}")
    if args.label_smoothing == 1:
        raise ConfigError("--label_smoothing", found=1, expected="below 1: with 1, the labels have no effect")
    for name, high in _AT_MOST.items():
        value = getattr(args, name)
        if value is not None and value > high:
            raise ConfigError(f"--{name}", found=value, expected=f"at most {high:.10g}")


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
    if re.search(r"\$[{(A-Za-z_]", save):
        raise ConfigError("--save", problem=f"{shorten(save)} has a shell variable that nothing replaces here",
                          remedy="write the path itself")
    check_folder(Path(save), "--save")
    check_outside_runs(Path(save), "--save")
    check_folder(Path(save) / "checkpoints", "--save")
    for name in RUN_FILES:
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
    import fsspec

    protocol, separator, _ = mirror.partition("://")
    local = not separator or protocol in ("file", "local")
    if separator and not protocol:
        raise ConfigError("--checkpoint_mirror", found=mirror, expected="a folder, or a URL such as s3://bucket/run")
    if not local:
        try:
            for name in protocol.split("::"):  # simplecache::s3://bucket is one URL
                fsspec.get_filesystem_class(name)
        except ImportError as error:
            raise ConfigError("--checkpoint_mirror", problem=f"{protocol}:// needs a package: {error}") from None
        except ValueError:
            known = fsspec.available_protocols()
            raise ConfigError("--checkpoint_mirror", found=f"the protocol {protocol}://",
                              expected="a folder, or a URL that fsspec knows such as s3://bucket/run",
                              word=protocol, known=known) from None
        return
    folder, run = (Path(os.path.realpath(name)) for name in (mirror.partition("://")[2] if separator else mirror, save))
    if folder == run or run in folder.parents:
        raise ConfigError("--checkpoint_mirror", problem=f"{folder} lies in the run folder (--save {save})",
                          remedy="choose a folder elsewhere: this copy would be lost with the run folder")
    if not any(Path(save, "checkpoints").glob("global_step*")):
        check_folder(folder, "--checkpoint_mirror")
