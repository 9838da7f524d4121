"""Parts of a translation that several programs share: copied flags, optimizer, schedule, degrees, monitors, data."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, get_args

from pretrain.commands.translate.convert import CONVERSIONS, end_of_clipped_line
from pretrain.commands.translate.result import Result
from pretrain.commands.translate.settings import OFF, Settings, as_number
from pretrain.config.ds_json.read import get_value
from pretrain.config.flags.arguments import FLAGS, RunArguments
from pretrain.config.other_programs import conversion_for, difference_of, names_for
from pretrain.errors import ConfigError
from pretrain.model.config import preset_names

_KINDS = {each.name: (each.type, *get_args(each.type)) for each in dataclasses.fields(RunArguments)}
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
_COPIED = tuple(name for name in FLAGS if name not in _COMPUTED)
PLACEHOLDER = "TO-DO"  # beginning of values that the user has to replace


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
        is_default = value is None or (not given and value == FLAGS[flag].unset) or value == getattr(
            RunArguments, flag, None)
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
        value = CONVERSIONS[convert](value)
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


def note_differences(settings: Settings, result: Result) -> None:
    """Add to each setting that became something how its meaning differs."""
    for name, value in settings.given.items():
        how = difference_of(name)
        if how and name in result.rows and value not in OFF:
            result.differs(how, name)


def write_optimizer(settings: Settings, result: Result, kind: str, *names: str) -> None:
    """Write type and parameters of the optimizer, where the JSON of the input does not have them.

    names: settings that choose the optimizer.
    """
    if get_value(result.json, "optimizer.type") is None:
        result.set_json("optimizer.type", kind, *names)
    kind = result.json["optimizer"]["type"]
    values: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for flag, dotted in (("learning_rate", "lr"), ("weight_decay", "weight_decay"), ("adam_epsilon", "eps")):
        name = _source(settings, flag)
        if name and not (dotted == "eps" and kind not in ("Adam", "AdamW", "AdamW8bit")):
            values[dotted] = (settings.number(name), (name,))
    betas = [_source(settings, f"adam_beta{number}") for number in (1, 2)]
    if all(betas) and kind in ("Adam", "AdamW", "AdamW8bit", "Lamb"):
        values["betas"] = ([settings.number(name) for name in betas], tuple(betas))
    for dotted, (value, sources) in values.items():
        found = get_value(result.json, f"optimizer.params.{dotted}")
        if found in (None, "auto"):
            result.set_json(f"optimizer.params.{dotted}", value, *sources)
        elif found != value and any(map(settings.has, sources)):
            result.none(f"the JSON's optimizer has {found}, which is used", *sources)
        else:
            result.used(f"as in the optimizer of the JSON: {found}", *sources)
    clipping = _source(settings, "gradient_clipping")
    if clipping and result.json.get("gradient_clipping") in (None, "auto"):
        result.set_json("gradient_clipping", settings.number(clipping), clipping)
    elif clipping:
        result.used(f"as in the JSON: {result.json['gradient_clipping']}", clipping)


def _source(settings: Settings, flag: str) -> str:
    """Return the setting that gives the value of a flag, one that is given before one with a default; "": none."""
    names = names_for(flag)
    return next((name for name in names if settings.has(name)),
                next((name for name in names if settings.get(name) is not None), ""))


@dataclasses.dataclass(frozen=True)
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
        stop = end_of_clipped_line(warmup=start, end=int(stop or length or 0), ratio=ratio)
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


def write_degrees(settings: Settings, result: Result, **names: str) -> None:
    """Write parallel degrees into the JSON. Arguments: setting of each of tensor, pipeline, sequence, expert."""
    for kind, dotted in (("tensor", "tensor_parallel.autotp_size"), ("pipeline", "pipeline.stages"),
                         ("sequence", "sequence_parallel_size"), ("expert", "expert_parallel.autoep_size")):
        name = names.get(kind)
        degree = settings.whole(name, 1) if name else 1
        if name and degree > 1:
            if kind == "expert":
                result.set_json("expert_parallel.enabled", True)
            result.set_json(dotted, degree, name)
        elif name:
            result.used("1: nothing to write", *(each for each in [name] if settings.has(each)))


def write_recompute(result: Result, every_layers: int, *names: str) -> None:
    """Write recomputation of complete blocks, in groups of `every_layers`."""
    if every_layers == 1:
        result.set_run("recompute", "blocks", *names)
    else:
        result.set_json("pipeline.activation_checkpoint_interval", every_layers, *names)


def write_monitor(result: Result, block: str, keys: dict[str, Any], *names: str) -> None:
    """Turn a monitor of the JSON on."""
    result.set_json(f"{block}.enabled", True, *names)
    for key, value in keys.items():
        if value not in OFF:
            result.set_json(f"{block}.{key}", value, *names)


def write_data(settings: Settings, result: Result, flag: str, words: Sequence[str], *names: str) -> None:
    """Write prefixes of token files, with weights, and list those that are not on this machine."""
    if not words:
        return
    value = list(words)
    result.set_run(flag, value if len(value) > 1 else value[0], *names)
    prefixes = [word for word in value if as_number(word) is None]
    missing = [prefix for prefix in prefixes if not os.path.exists(f"{prefix}.idx") and "://" not in prefix]
    if missing:
        result.remaining.append(f"--{flag}: bring the token files here; they are read as they are (.bin and .idx): "
                                f"{', '.join(missing[:3])}{', ...' * (len(missing) > 3)}")


def no_data(result: Result, why: str) -> None:
    """Write a placeholder for the training data."""
    result.run["train_data"] = f"{PLACEHOLDER}/tokens"
    result.remaining.append(f"--train_data: {why}; `ds-pretrain prepare` makes token files of text")


def write_tokenizer(settings: Settings, result: Result, value: str, *names: str) -> None:
    """Write the tokenizer."""
    result.set_run("tokenizer", value, *names)
    is_name = value in (*preset_names(), "bytes")
    if not is_name and not os.path.exists(value):
        result.remaining.append(f"--tokenizer: {value} is not on this machine; bring it here, or name another one")


def write_load(settings: Settings, result: Result, load: str, save: str) -> None:
    """Say what becomes of the setting that names a checkpoint to load. `save`: the one that names the run's own."""
    if not settings.has(load):
        return
    if settings.get(load) in (settings.get(save), True):
        result.used("a run resumes from its own checkpoints by itself", load)
        return
    result.used("see what remains to do", load)
    result.remaining.append(f"the input starts from the checkpoint {settings.text(load)}: `ds-pretrain import` reads "
                            "it, and --resume_from or --init_from continues from the result")


def note_variables(result: Result) -> None:
    """List the values in which a variable of a script remains, that the script does not set."""
    for name, value in result.run.items():
        if "$" in str(value):
            result.remaining.append(f"--{name}: {value} has a variable that the script does not set")


def no_tokenizer(result: Result) -> None:
    """List that the run has no tokenizer."""
    result.remaining.append("--tokenizer: the input names none; it is not necessary for training, but checks the data, "
                            "and `ds-pretrain generate` needs it")
