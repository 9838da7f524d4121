"""Make the learning-rate schedule that the --lr_* flags describe.

Flags in tokens are converted to steps once, through the batch sizes that the run plans. From then on the schedule is a
function of applied optimizer updates, which the checkpoint stores: it is exact at a resume, and an update that fp16 or
the guard skips, or a rollback, moves no rate.
"""

import itertools

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import RunLength
from pretrain.config.schedule import KINDS, Schedule, check_own_schedule, import_schedule
from pretrain.data.token_schedules import parse_token_count, parse_whole_number
from pretrain.errors import ConfigError
from pretrain.own_code import is_own

DEFAULT_WSD_FRACTION = 0.2  # of the steps until --lr_decay_steps
DEFAULT_MILESTONE_FACTOR = 0.1


def default_warmup_steps(train_steps: int, kind: str = "cosine") -> int:
    """Return the kind's fraction of the run, at least one step."""
    return max(1, round(KINDS[kind].warmup_fraction * train_steps))


def make_schedule(flags: RunArguments, *, peak: float, length: RunLength) -> Schedule:
    """Return the schedule of the flags. None selects a flag's default. `check_flags` has checked each flag by itself.

    Raises:
        ConfigError: if the warm-up is longer than the run, if the decay ends before the warm-up does, if wsd's final
            decay does not fit between them, or if a milestone is not after the warm-up.
    """
    if is_own(flags.lr_schedule):
        import_schedule(flags.lr_schedule)
    name, kind = flags.lr_schedule, KINDS[flags.lr_schedule]
    warmup_steps = _warmup_steps(flags, length)
    decay_steps = _steps(flags.lr_decay_steps, flags.lr_decay_tokens, length, default=length.train_steps)
    if kind.decays:
        _check_range(_given(flags, "lr_decay"), decay_steps, max(warmup_steps, 1))
    has_milestones = "lr_milestones" in kind.flags
    schedule = Schedule(
        name, peak, _min_ratio(flags, peak), warmup_steps, decay_steps,
        wsd_steps=_wsd_steps(flags, warmup_steps, decay_steps, length) if "lr_wsd_steps" in kind.flags else 0,
        decay_shape=flags.lr_decay_shape or "linear", initial_ratio=kind.initial_ratio or 0.0,
        milestones=_milestones(flags, warmup_steps, length) if has_milestones else (),
        milestone_factor=flags.lr_milestone_factor or DEFAULT_MILESTONE_FACTOR if has_milestones else 1.0,
        first_number=0 if flags.lr_counts_from_0 else 1)
    check_own_schedule(schedule, length.train_steps)
    return schedule


def _given(flags: RunArguments, name: str) -> str:
    """Return "--NAME_tokens" if this flag is given, else "--NAME_steps"."""
    return f"--{name}_tokens" if getattr(flags, f"{name}_tokens") is not None else f"--{name}_steps"


def _steps(steps: int | None, tokens: int | None, length: RunLength, *, default: int) -> int:
    if tokens is not None:
        return length.steps_of(tokens)
    return default if steps is None else steps


def _warmup_steps(flags: RunArguments, length: RunLength) -> int:
    warmup_steps = _steps(flags.lr_warmup_steps, flags.lr_warmup_tokens, length,
                          default=default_warmup_steps(length.train_steps, flags.lr_schedule))
    _check_range(_given(flags, "lr_warmup"), warmup_steps, KINDS[flags.lr_schedule].least_warmup_steps,
                 length.train_steps, "the run")
    return warmup_steps


def _wsd_steps(flags: RunArguments, warmup_steps: int, decay_steps: int, length: RunLength) -> int:
    """Return the length of wsd's final decay, which ends at step number `decay_steps`."""
    longest = decay_steps - warmup_steps
    if flags.lr_wsd_tokens is not None:
        start = max(length.tokens_after(decay_steps) - flags.lr_wsd_tokens, 0)
        first = length.steps_of(start)
        wsd_steps = decay_steps - (first - 1 if length.tokens_after(first) > start else first)  # rounded up, too
    elif flags.lr_wsd_steps is not None:
        wsd_steps = flags.lr_wsd_steps
    else:
        wsd_steps = min(max(1, round(DEFAULT_WSD_FRACTION * decay_steps)), longest)
    _check_range(_given(flags, "lr_wsd"), wsd_steps, 0, longest, "the steps between warm-up and --lr_decay_steps")
    return wsd_steps


def _min_ratio(flags: RunArguments, peak: float) -> float:
    """Return the lowest rate as a fraction of the peak."""
    if flags.min_lr is None:
        return KINDS[flags.lr_schedule].min_ratio if flags.min_lr_ratio is None else flags.min_lr_ratio
    if flags.min_lr > peak:
        raise ConfigError("--min_lr", found=f"{flags.min_lr:g}", expected=f"at most the peak rate, {peak!r}")
    return flags.min_lr / peak


def _milestones(flags: RunArguments, warmup_steps: int, length: RunLength) -> tuple[int, ...]:
    """Return the numbers of steps after which the rate of `step` is multiplied."""
    text = flags.lr_milestone_tokens or flags.lr_milestones or ""
    flag = "--lr_milestone_tokens" if flags.lr_milestone_tokens else "--lr_milestones"
    parse = parse_token_count if flags.lr_milestone_tokens else parse_whole_number
    numbers = [parse(word) for word in text.split(",")]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or any(after <= before for before, after in itertools.pairwise(known)):
        raise ConfigError(flag, found=text, expected="numbers that rise, such as 8000,9000")
    milestones = tuple(known if flags.lr_milestones else map(length.steps_of, known))
    if milestones[0] < max(warmup_steps, 1):
        raise ConfigError(flag, found=f"step {milestones[0]}", expected=f"after the {warmup_steps} warm-up steps")
    if len(set(milestones)) < len(milestones):
        raise ConfigError(flag, found=text, expected="milestones in different steps")
    return milestones


def _check_range(flag: str, value: int, low: int, high: int | None = None, meaning: str = "") -> None:
    if value < low or (high is not None and value > high):
        limit = "" if high is None else f" and at most {high} ({meaning})"
        raise ConfigError(flag, found=value, expected=f"at least {low}{limit} steps")
