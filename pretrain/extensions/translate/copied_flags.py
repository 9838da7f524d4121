"""Flags that have one counterpart in another program: their values, converted as other_programs.yaml says."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from pretrain.config.flags.arguments import DEFAULTS, FLAGS, TYPES
from pretrain.errors import ConfigError
from pretrain.extensions.translate.result import Result
from pretrain.extensions.translate.settings import Settings, as_number
from pretrain.extensions.translate.tables import conversion_for, names_for
from pretrain.monitor.repeatable import NEVER_REPEATED

_KINDS = {name: (kind, *get_args(kind)) for name, kind in TYPES.items()}
# flags whose values other parts compute, from several settings or from words that are no values here
_COMPUTED = frozenset("""
    deepspeed_config model model_overrides init_from train_data valid_data test_data blend_schedule sample_order packing
    dataset_module dataset_args tokenizer seq_length train_steps train_tokens batch_schedule lr_schedule lr_warmup_steps
    lr_warmup_tokens lr_decay_steps lr_decay_tokens lr_wsd_steps lr_wsd_tokens lr_decay_shape min_lr min_lr_ratio
    no_weight_decay init_method output_init_method init_std mup_base_width embedding_dropout attention_dropout
    residual_dropout trackio deepspeed_log_level profile_steps profile_ranks memory_snapshot resume resume_from override
    checkpoint_mirror recompute recompute_every precision micro_batch_size gradient_accumulation_steps
    global_batch_size learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay gradient_clipping
    noise_scale_interval early_stopping_patience keep_best keep_every local_rank spike_policy eval_tasks
    document_attention decay_vectors lr_counts_from_0
    """.split())  # noqa: SIM905 (readable)
# nor those that a file of somebody else must not set
_COPIED = tuple(name for name in FLAGS if name not in _COMPUTED and name not in NEVER_REPEATED)


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
