"""Flags of the run from the settings of another program: copied values, the schedule of rates, and that of batches.

Values are converted as other_programs.yaml says.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pretrain.config.flags.arguments import DEFAULTS, FLAGS, TYPES, RunArguments
from pretrain.errors import ConfigError
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import Settings, as_number, conversion_for, names_for
from pretrain.monitor.repeatable import NEVER_REPEATED

_KINDS = {name: (kind, *get_args(kind)) for name, kind in TYPES.items()}
# flags whose values other parts compute, from several settings or from words that are no values here
_COMPUTED = frozenset("""
    deepspeed_config model model_overrides init_from train_data valid_data test_data blend_schedule sample_order
    packing dataset_module dataset_args tokenizer seq_length train_steps train_tokens batch_schedule lr_schedule
    lr_warmup_steps lr_warmup_tokens lr_decay_steps lr_decay_tokens lr_wsd_steps lr_wsd_tokens lr_decay_shape min_lr
    min_lr_ratio no_weight_decay init_method output_init_method init_std mup_base_width embedding_dropout
    attention_dropout residual_dropout trackio deepspeed_log_level resume resume_from override checkpoint_mirror
    recompute recompute_every precision micro_batch_size gradient_accumulation_steps global_batch_size learning_rate
    adam_beta1 adam_beta2 adam_epsilon weight_decay gradient_clipping noise_scale_interval early_stopping_patience
    keep_best keep_every local_rank spike_policy document_attention decay_vectors lr_counts_from_0
    """.split())  # noqa: SIM905 (readable)
# nor those of extensions, nor those that a file of somebody else must not set
_COPIED = tuple(field.name for field in dataclasses.fields(RunArguments) if field.name in FLAGS
                and field.name not in _COMPUTED and field.name not in NEVER_REPEATED)


def _without_spaces(value: Any) -> str:
    """Return proportions as --split takes them: 969,30,1."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace(" ", "").replace("/", ",").strip("'\"")


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "minutes_to_seconds": lambda value: value * 60,
    "none_above_a_year": lambda value: None if value > 365 * 24 * 60 else value,  # minutes
    "none_below_zero": lambda value: None if value < 0 else value,  # -1 is no limit
    "at_least_two": lambda value: max(value, 2) if value else 0,  # 0 keeps all checkpoints, as a missing number does
    "unless_disabled": lambda value: value not in (False, "disabled", "false", "False"),
    "first_number": lambda value: as_number(value[0] if isinstance(value, list) and value else value),
    "without_spaces": _without_spaces,
}


def copy_flags(settings: Settings, result: Result, *, without: Sequence[str] = ()) -> None:
    """Write the flags that have one counterpart in the other program, and its defaults where they differ from ours.

    `without`: flags that the program's own part has written.
    """
    for flag in _COPIED:
        names = [name for name in names_for(flag) if settings.get(name) is not None]
        given = [name for name in names if settings.has(name)]
        name = (given or names or [""])[0]
        if not name or flag in without or flag in result.run:
            continue
        value = _value(settings, name, flag)
        is_default = value is None or (not given and value == FLAGS[flag].unset) or value == DEFAULTS[flag]
        if is_default and name in given:
            result.used(f"{flag}: {_shown(value)}, the default", name)
        elif not is_default:
            result.set_run(flag, value, name)
        for other in given[1:]:
            result.none(f"{name} has its meaning too, and is used", other)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _value(settings: Settings, name: str, flag: str) -> Any:
    """Return the value of a setting as the flag takes it; None: not given. Raises ConfigError."""
    kinds, convert = _KINDS[flag], conversion_for(name)
    value = settings.get(name)
    if bool in kinds and convert != "unless_disabled":
        value = settings.is_on(name)
    elif (int in kinds or float in kinds) and convert != "first_number":
        value = settings.number(name)
    if convert:
        value = _CONVERSIONS[convert](value)
    if value is not None and int in kinds:
        if value != int(value):
            raise settings.wrong(name, "a whole number")
        value = int(value)
    if value is not None:
        try:
            FLAGS[flag].check(flag, value)
        except ConfigError as error:
            raise ConfigError(settings.where(name), problem=f"its counterpart rejects it: {error}") from None
    return value


@dataclass(frozen=True)
class Rates:
    """The learning-rate schedule of a run, in steps, or in tokens where `unit` says so."""

    kind: str  # value of --lr_schedule
    warmup: int | None  # None: unknown, because the length of the run is
    end: int | None  # where the lowest rate is reached; None: at the end of the run
    lowest: float  # a rate
    peak: float
    unit: str = "steps"
    counts_from_0: bool = True  # as all programs do but torchtitan: each step has the rate of the one before it
    is_clipped: bool = False  # the line falls to 0 and is clipped at the lowest rate
    wsd: int | None = None  # length of the final decay of wsd
    shape: str = "linear"


def write_schedule(result: Result, rates: Rates, *, kind: Sequence[str], warmup: Sequence[str], end: Sequence[str],
                   lowest: Sequence[str], wsd: Sequence[str] = (), length: int | None = None) -> None:
    """Write the flags of a schedule; the other arguments are the settings that they come from.

    length: of the run, in the unit of the rates; None: unknown.
    """
    result.set_run("lr_schedule", rates.kind, *kind)
    least = 1 if rates.kind == "inverse_sqrt" else 0
    if rates.warmup is None:
        result.used("see what remains to do", *warmup)
    else:
        result.set_run(f"lr_warmup_{rates.unit}", max(rates.warmup, least), *warmup)
    if rates.counts_from_0 and (rates.kind != "constant" or rates.warmup != 0):
        result.set_run("lr_counts_from_0", True)
    if rates.kind == "constant":
        result.used("no effect: the rate is constant", *end, *lowest)
        return
    stop, start = rates.end, rates.warmup or 0
    if rates.is_clipped and rates.kind == "linear" and rates.lowest > 0 and rates.peak > 0 and (stop or length):
        ratio = rates.lowest / rates.peak
        stop = _end_of_clipped_line(warmup=start, end=int(stop or length or 0), ratio=ratio)
        result.differs("the line to 0 is clipped at the lowest rate there; here it ends there, with the same rates",
                       *lowest)
    if rates.kind == "inverse_sqrt":
        result.differs("MATTERS: here the rate falls until the run ends; there it is the lowest one from this step on",
                       *end)
    elif stop is not None and stop != length:
        result.set_run(f"lr_decay_{rates.unit}", max(stop, start, 1), *end)
    else:
        result.used("the decay ends with the run", *end)
    if rates.kind == "wsd" and rates.wsd is not None:
        result.set_run(f"lr_wsd_{rates.unit}", rates.wsd, *wsd)
        if rates.shape != "linear":
            result.set_run("lr_decay_shape", rates.shape, *wsd)
    result.set_run("min_lr", rates.lowest, *lowest)


def _end_of_clipped_line(*, warmup: int, end: int, ratio: float) -> int:
    """Return the step at which a line that falls from the peak to 0 at `end` reaches `ratio` of the peak.

    GPT-NeoX (megatron/learning_rates.py) clips the line at its lowest rate; here the line ends at the lowest rate.
    """
    return warmup + round((1 - ratio) * (end - warmup))


def batch_stages(ramp: Sequence[int], *, final: int, seq_length: int) -> str:
    """Return --batch_schedule for Megatron-LM's --rampup-batch-size START INCREMENT SAMPLES.

    The batch grows by INCREMENT after each of equal parts of SAMPLES (core/num_microbatches_calculator.py).
    """
    start, increment, samples = ramp
    increments = (final - start) // increment
    starts = [math.ceil(samples * number / increments) * seq_length for number in range(increments + 1)]
    return ",".join(f"{tokens}:{start + number * increment}" for number, tokens in enumerate(starts))
