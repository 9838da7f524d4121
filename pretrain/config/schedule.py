"""Length of a run and its learning rate: pure functions of flags and steps."""

import dataclasses
import math
from dataclasses import dataclass

from pretrain.config.arguments import RunArguments
from pretrain.errors import ConfigError

KINDS = ("cosine", "linear", "constant", "wsd")
DEFAULT_WARMUP_SHARE = 0.01  # of the run
DEFAULT_WSD_SHARE = 0.2  # of the decay


def learning_rate(step: int, *, peak: float, min_ratio: float, kind: str, warmup_steps: int, decay_steps: int,
                  wsd_steps: int) -> float:
    """The rate of the step that follows `step` applied optimizer steps (a step that fp16 skipped is not applied).

    The first step has peak / warmup_steps, step number warmup_steps has the peak, step number decay_steps and all
    later ones have peak * min_ratio ("constant" keeps the peak; "wsd" keeps it until wsd_steps before decay_steps).
    """
    number = step + 1
    if number < warmup_steps:
        return peak * number / warmup_steps
    if kind == "constant":
        return peak
    start = decay_steps - wsd_steps if kind == "wsd" else warmup_steps
    progress = min(max((number - start) / max(decay_steps - start, 1), 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return peak * (min_ratio + (1 - min_ratio) * left)


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run; calling it gives the rate of one step."""

    kind: str
    peak: float
    min_ratio: float  # lowest rate as a share of the peak
    warmup_steps: int
    decay_steps: int  # the step number that has the lowest rate
    wsd_steps: int  # length of wsd's final decay; 0 for the other kinds

    def __call__(self, step: int) -> float:
        """The rate after `step` applied optimizer steps."""
        return learning_rate(step, **dataclasses.asdict(self))


def run_steps(args: RunArguments, global_batch_size: int) -> int:
    """Optimizer steps of the run; --train_tokens is rounded up to whole steps."""
    if (args.train_steps is None) == (args.train_tokens is None):
        found = "neither of them" if args.train_steps is None else "both"
        raise ConfigError("--train_steps / --train_tokens", found=found, expected="one of the two")
    name, value = ("--train_steps", args.train_steps) if args.train_steps is not None else \
        ("--train_tokens", args.train_tokens)
    if value is None or value < 1:
        raise ConfigError(name, found=value, expected="at least 1")
    if args.train_steps is not None:
        return args.train_steps
    return -(-value // (global_batch_size * args.seq_length))


def default_warmup_steps(args: RunArguments, train_steps: int) -> int:
    """--lr_warmup_steps, or 1% of the run (at least one step)."""
    if args.lr_warmup_steps is not None:
        return args.lr_warmup_steps
    return max(1, round(DEFAULT_WARMUP_SHARE * train_steps))


def make_schedule(args: RunArguments, *, train_steps: int, peak_lr: float | None) -> Schedule | None:
    """The schedule of the --lr_* flags; None where the JSON has its own scheduler (`peak_lr` None). ConfigError."""
    if peak_lr is None:
        return None
    check_schedule_words(args)
    warmup_steps = default_warmup_steps(args, train_steps)
    decay_steps = train_steps if args.lr_decay_steps is None else args.lr_decay_steps
    _check_order("--lr_warmup_steps", warmup_steps, 0, train_steps, "the run")
    if args.lr_schedule != "constant":
        _check_order("--lr_decay_steps", decay_steps, max(warmup_steps, 1), None, "")
    wsd_steps = 0
    if args.lr_schedule == "wsd":
        longest = decay_steps - warmup_steps
        default = min(max(1, round(DEFAULT_WSD_SHARE * decay_steps)), longest)
        wsd_steps = default if args.lr_wsd_steps is None else args.lr_wsd_steps
        _check_order("--lr_wsd_steps", wsd_steps, 0, longest, "what warm-up leaves of the decay")
    return Schedule(args.lr_schedule, peak_lr, args.min_lr_ratio, warmup_steps, decay_steps, wsd_steps)


def check_schedule_words(args: RunArguments) -> None:
    """The --lr_* flags by themselves: words, ranges, and none without an effect."""
    if args.lr_schedule not in KINDS:
        raise ConfigError("--lr_schedule", found=args.lr_schedule, expected=", ".join(KINDS),
                          word=args.lr_schedule, known=KINDS)
    if not 0 <= args.min_lr_ratio <= 1:
        raise ConfigError("--min_lr_ratio", found=args.min_lr_ratio, expected="a share from 0 to 1")
    if args.lr_wsd_steps is not None and args.lr_schedule != "wsd":
        raise ConfigError("--lr_wsd_steps", found=f"{args.lr_wsd_steps} with --lr_schedule {args.lr_schedule}",
                          expected="no value", remedy="only --lr_schedule wsd has a final decay")
    if args.lr_decay_steps is not None and args.lr_schedule == "constant":
        raise ConfigError("--lr_decay_steps", found=f"{args.lr_decay_steps} with --lr_schedule constant",
                          expected="no value", remedy="a constant rate does not decay")


def _check_order(flag: str, value: int, low: int, high: int | None, of: str) -> None:
    if value < low or (high is not None and value > high):
        upto = "" if high is None else f" and at most {high} ({of})"
        raise ConfigError(flag, found=value, expected=f"at least {low}{upto} steps")
