"""The result of a translation, and the parts of it that several programs share.

The result has the contents of the three files, and what became of each setting. The parts are optimizer, degrees,
monitors, data, tokenizer and checkpoints.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pretrain.config.auto_values import set_value
from pretrain.config.ds_json.read import get_value
from pretrain.extensions.translate.settings import OFF, Settings, as_number, names_for
from pretrain.model.config import preset_names

BECAME, DIFFERS, NONE = "became", "differs", "no counterpart"  # outcomes of a setting
RUN, JSON, MODEL = "run.yaml", "ds_config.json", "config.json"
PLACEHOLDER = "TO-DO"  # beginning of values that the user has to replace


@dataclass
class Row:
    """One setting of the other program, and its counterpart here."""

    outcome: str
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text of the counterpart, or why there is none, and how it differs."""
        return "; ".join(dict.fromkeys(self.texts))


@dataclass
class Result:
    """Grows while the parts of the translation write into it."""

    run: dict[str, Any] = field(default_factory=dict)
    json: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)  # by name of the setting; also of defaults that are written
    remaining: list[str] = field(default_factory=list)  # what the user has to do

    def set_run(self, key: str, value: Any, *names: str) -> None:
        """Write a flag into run.yaml; `names` are the settings that it comes from."""
        self.run[key] = value
        self._became(names, f"{key}: {_short(value)}")

    def set_json(self, dotted: str, value: Any, *names: str) -> None:
        """Write a key into the DeepSpeed JSON."""
        set_value(self.json, dotted, value)
        self._became(names, f"{JSON} {dotted}: {_short(value)}")

    def set_model(self, key: str, value: Any, *names: str) -> None:
        """Write a key into the config.json."""
        self.model[key] = value
        self._became(names, f"{MODEL} {key}: {_short(value)}")

    def used(self, text: str, *names: str) -> None:
        """Record that settings are in effect, with what they became in words."""
        self._became(names, text)

    def differs(self, how: str, *names: str) -> None:
        """Record that the meaning of settings differs here."""
        for name in names:
            self._row(name, DIFFERS).outcome = DIFFERS
            self._row(name, DIFFERS).texts.append(how)

    def none(self, why: str, *names: str) -> None:
        """Record that settings have no counterpart, unless they became something."""
        for name in names:
            self._row(name, NONE).texts.append(why)

    def _row(self, name: str, outcome: str) -> Row:
        return self.rows.setdefault(name, Row(outcome))

    def _became(self, names: tuple[str, ...], text: str) -> None:
        for name in names:
            row = self._row(name, BECAME)
            row.outcome = DIFFERS if row.outcome == DIFFERS else BECAME
            row.texts.append(text)


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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


def write_monitor(result: Result, block: str, keys: Mapping[str, Any], *names: str) -> None:
    """Turn a monitor of the JSON on."""
    result.set_json(f"{block}.enabled", True, *names)
    for key, value in keys.items():
        if value not in OFF:
            result.set_json(f"{block}.{key}", value, *names)


def write_tensorboard(settings: Settings, result: Result) -> None:
    """Turn TensorBoard on, if the input has a folder for it."""
    if settings.get("tensorboard_dir") not in OFF:
        write_monitor(result, "tensorboard", {"output_path": settings.text("tensorboard_dir")}, "tensorboard_dir")


def write_profile(settings: Settings, result: Result, start: str, stop: str, *names: str) -> None:
    """Write the steps to profile. `start` and `stop`: the settings that bound them; `names`: all that are in effect."""
    if settings.is_on("profile"):
        steps = settings.whole(start, 10), settings.whole(stop, 12)
        result.set_run("profile_steps", ":".join(map(str, steps)), *names)


def write_train_data(settings: Settings, result: Result, words: Sequence[str], *names: str) -> None:
    """Write the token files of training, or a placeholder without any."""
    if words:
        write_data(result, "train_data", words, *names)
        result.differs(f"the samples are shuffled in another order; `sample_order: {settings.program}` is "
                       f"{settings.program_name}'s", names[0])
    else:
        no_data(settings, result)


def write_evaluation_data(result: Result, flag: str, words: Sequence[str], count: int, name: str) -> None:
    """Write the token files of an evaluation. `count`: of the sets in the input."""
    write_data(result, flag, words, name)
    if count > 1:
        result.differs("several sets are evaluated each by itself, and not as a blend", name)


def write_data(result: Result, flag: str, words: Sequence[str], *names: str) -> None:
    """Write prefixes of token files, with weights, and list those that are not on this machine."""
    if not words:
        return
    result.set_run(flag, list(words) if len(words) > 1 else words[0], *names)
    prefixes = [word for word in words if as_number(word) is None]
    missing = [prefix for prefix in prefixes if not os.path.exists(f"{prefix}.idx") and "://" not in prefix]
    if missing:
        result.remaining.append(f"--{flag}: bring the token files here; they are read as they are (.bin and .idx): "
                                f"{', '.join(missing[:3])}{', ...' * (len(missing) > 3)}")


def no_data(settings: Settings, result: Result, *named: str) -> None:
    """Write a placeholder for the training data. `named`: settings that name text."""
    texts = ", ".join(settings.text(name) for name in named)
    why = f"text must be tokenized first ({texts})" if named else "the input names no data"
    result.run["train_data"] = f"{PLACEHOLDER}/tokens"
    result.remaining.append(f"--train_data: {why}; `ds-pretrain prepare` makes token files of text")


def write_tokenizer(result: Result, value: str, *names: str, why: str = "off") -> None:
    """Write the tokenizer, or list that the run has none. `why`: the reason, if `names` give no tokenizer."""
    if not value:
        result.none(why, *names)
        result.remaining.append("--tokenizer: the input names none; it is not necessary for training, but checks the "
                                "data, and `ds-pretrain generate` needs it")
        return
    result.set_run("tokenizer", value, *names)
    if value not in (*preset_names(), "bytes") and not os.path.exists(value):
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
