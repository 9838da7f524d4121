"""Settings of transformers.Trainer: TrainingArguments of 5.23.0, and run_clm.py of its examples."""

import json
import math
from typing import Any

from pretrain.config.ds_json.read import DsFile
from pretrain.config.trainer_schedules import NAMES as SCHEDULES
from pretrain.config.trainer_schedules import schedule_flags
from pretrain.errors import ConfigError
from pretrain.extensions.translate import parts
from pretrain.extensions.translate.deepspeed_json import take_json_file, take_named_json
from pretrain.extensions.translate.flags import Rates, copy_flags, write_schedule
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import OFF, Settings, as_number
from pretrain.model.config import find_config, model_config_from
from pretrain.model.config_keys import parse_overrides, read_config_json
from pretrain.model.families import FAMILIES

_OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW", "adamw_apex_fused": "AdamW",
               "adamw_bnb_8bit": "AdamW8bit", "adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "AdamW8bit",
               "lion_32bit": "Lion", "paged_lion_32bit": "Lion", "sgd": "SGD", "adagrad": "Adagrad",
               "rmsprop": "RMSprop"}
_BLOCK_SIZE = 1024  # largest default of run_clm.py


def translate_trainer(settings: Settings, result: Result, *, dataset_tokens: int | None) -> None:
    """Translate settings of transformers.Trainer. `dataset_tokens`: of the training data, for epochs."""
    with_json = _take_json(settings, result)
    _model(settings, result)
    parts.write_optimizer(settings, result, settings.choice("optim", _OPTIMIZERS), "optim")
    _batch(settings, result)
    positions = model_config_from(result.model, "config.json").max_positions if result.model else _BLOCK_SIZE
    result.set_run("seq_length", settings.whole("block_size", min(_BLOCK_SIZE, positions), low=1), "block_size")
    _length_and_schedule(settings, result, dataset_tokens)
    _layout(settings, result, with_json)
    _evaluation_and_saving(settings, result)
    _data(settings, result)
    _logging(settings, result)
    if settings.text("train_sampling_strategy", "") == "random":
        result.used("the samples are shuffled", "train_sampling_strategy")
    copy_flags(settings, result, without=("eval_interval", "eval_steps", "save_interval", "save", "split"))


def _take_json(settings: Settings, result: Result) -> bool:
    """Take the JSON of --deepspeed: a file, or a block of the input. Returns whether there is one."""
    value = settings.get("deepspeed")
    if value in OFF:
        return False
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(settings.where("deepspeed"), problem=f"it is not JSON: {error}") from None
    if isinstance(value, dict):
        take_named_json(result, DsFile("deepspeed", value), "deepspeed")
    else:
        take_json_file(settings, result, "deepspeed", flag="--deepspeed")
    return True


def _model(settings: Settings, result: Result) -> None:
    """Write the config.json that run_clm.py makes: from --config_name, --model_name_or_path or --model_type."""
    source = settings.first("config_name", "model_name_or_path", "model_type")
    overrides = settings.text("config_overrides", "") or None
    if not source:
        result.remaining.append("--model: the input does not name the model; give a preset, a config.json or its "
                                "folder")
    else:
        name = settings.text(source)
        if source == "model_type":
            if name not in FAMILIES:
                raise ConfigError(settings.where(source), found=name, expected=f"one of {', '.join(FAMILIES)}",
                                  word=name, known=FAMILIES)
            values: dict[str, Any] = {"model_type": name}
        else:
            values = read_config_json(find_config(name))
        if overrides:
            family = str(values.get("model_type"))
            values |= parse_overrides(overrides, family, values) if family in FAMILIES else {}
            result.used(f"config.json {overrides}", "config_overrides")
        result.model.update(values)
        result.used(f"config.json is {'its defaults' if source == 'model_type' else f'that of {name}'}", source)
    if settings.has("model_name_or_path"):
        result.set_run("init_from", settings.text("model_name_or_path"), "model_name_or_path")
    for name in settings.only("model_type", "config_name")[1:]:
        result.none(f"{source} names the model", name)


def _batch(settings: Settings, result: Result) -> None:
    for dotted, name in (("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
                         ("gradient_accumulation_steps", "gradient_accumulation_steps")):
        found = result.json.get(dotted)
        value = settings.whole(name, low=1)
        if found in (None, "auto", value):
            result.set_json(dotted, value, name)
        else:
            result.none(f"the JSON has {found}, which is used", name)
    if result.json.get("train_batch_size") == "auto":
        del result.json["train_batch_size"]
        result.rows.pop("deepspeed: train_batch_size", None)
        result.used("micro-batch x accumulation x data-parallel ranks", "deepspeed: train_batch_size")


def _length_and_schedule(settings: Settings, result: Result, dataset_tokens: int | None) -> None:
    steps, epochs = settings.number("max_steps", -1), settings.number("num_train_epochs")
    unit, length = "steps", None
    if steps > 0:
        length = settings.whole("max_steps", low=1)
        result.set_run("train_steps", length, "max_steps")
        result.none("max_steps has the length", *settings.only("num_train_epochs"))
    elif dataset_tokens:
        unit, length = "tokens", max(1, round(epochs * dataset_tokens))
        result.set_run("train_tokens", length, "num_train_epochs")
    else:
        result.used("see what remains to do", "num_train_epochs")
        result.remaining.append(f"--train_tokens: {epochs:g} times the tokens of the training data (num_train_epochs); "
                                "--dataset_tokens writes it, and the warm-up")
    if "scheduler" in result.json:
        result.none("the JSON's scheduler is used", *settings.only("lr_scheduler_type"))
        _json_warmup(settings, result, length if unit == "steps" else None)
        return
    _schedule(settings, result, unit, length)


def _json_warmup(settings: Settings, result: Result, train_steps: int | None) -> None:
    """Fill "auto" of the JSON's warm-up as transformers does: 0 steps without a setting."""
    key, names = "scheduler.params.warmup_num_steps", settings.only("warmup_steps", "warmup_ratio") or ["warmup_steps"]
    if result.json["scheduler"].get("params", {}).get("warmup_num_steps") != "auto":
        result.none("the JSON has the warm-up", *settings.only("warmup_steps", "warmup_ratio"))
        return
    count, ratio = _warmup(settings)
    if ratio and train_steps is None:
        result.used("see what remains to do", *names)
        result.remaining.append(f"{key} of ds_config.json: {ratio:g} of the steps, once they are known")
        return
    count = math.ceil(round(ratio * train_steps, 6)) if ratio and train_steps else count
    result.set_json(key, max(count, 1), *names)  # DeepSpeed's schedulers warm up for 2 steps with 0, 1 and 2


def _warmup(settings: Settings) -> tuple[int, float]:
    """Return the warm-up as (steps, 0), or as (0, fraction of the run)."""
    steps, ratio = settings.number("warmup_steps"), settings.number("warmup_ratio", 0)
    if 0 < steps < 1:  # transformers 5: warmup_steps below 1 are a fraction of the run
        return 0, steps
    return int(steps), 0 if steps else ratio


def _schedule(settings: Settings, result: Result, unit: str, length: int | None) -> None:
    word = settings.text("lr_scheduler_type").lower()
    if word not in SCHEDULES:
        settings.choice("lr_scheduler_type", dict.fromkeys(SCHEDULES))
    peak = float(result.json["optimizer"]["params"].get("lr") or 0)
    extra = settings.get("lr_scheduler_kwargs") or {}
    extra = json.loads(extra) if isinstance(extra, str) and extra.startswith("{") else extra
    if not isinstance(extra, dict):
        raise settings.wrong("lr_scheduler_kwargs", "a JSON object")
    warmup, ratio = _warmup(settings)
    names = settings.only("warmup_steps", "warmup_ratio") or ["warmup_steps"]
    if word == "constant":
        warmup = ratio = 0
    if ratio and length is None:
        result.remaining.append(f"--lr_warmup_tokens: {ratio:g} times --train_tokens")
    unit = unit if ratio or length is None or unit == "steps" else "steps"
    # transformers rounds a fraction of the steps up
    count = warmup if warmup or not ratio else None if length is None else math.ceil(round(ratio * length, 6))
    extra = {name: value if as_number(value) is None else as_number(value) for name, value in extra.items()}
    flags, difference = schedule_flags(word, extra, warmup=1 if count is None else count,
                                       total=length if unit == "steps" else None)
    if difference:
        raise ConfigError(settings.where("lr_scheduler_kwargs" if extra else "lr_scheduler_type"), problem=difference,
                          remedy="change it in the input")
    if unit == "tokens" and "lr_wsd_steps" in flags:
        raise ConfigError(settings.where("lr_scheduler_kwargs"), problem="num_decay_steps counts steps, and the run "
                          "has a length in epochs", remedy="give max_steps")
    lowest = flags.get("min_lr", peak * flags.get("min_lr_ratio", 0.0))
    rates = Rates(flags["lr_schedule"], count, flags.get("lr_decay_steps"), lowest=float(lowest), peak=peak, unit=unit,
                  counts_from_0="lr_counts_from_0" in flags, wsd=flags.get("lr_wsd_steps"),
                  shape=flags.get("lr_decay_shape", "linear"))
    more = settings.only("lr_scheduler_kwargs")
    write_schedule(result, rates, kind=["lr_scheduler_type"], warmup=names, end=(), lowest=more, wsd=more,
                   length=length)


def _layout(settings: Settings, result: Result, with_json: bool) -> None:
    for name in ("bf16", "fp16"):
        state = result.json.get(name, {}).get("enabled")
        if state == "auto":
            result.set_json(f"{name}.enabled", settings.is_on(name), *settings.only(name))
        elif settings.is_on(name) and state is None:
            result.set_json(f"{name}.enabled", True, name)
        elif settings.has(name):
            result.used("as the JSON says" if state is not None else "off", name)
    words = ["full_shard"] if settings.get("fsdp") is True else " ".join(settings.words("fsdp")).replace(
        ",", " ").split()
    if not with_json:
        stage = 3 if "full_shard" in words or "hybrid_shard" in words else \
            2 if words and words[0].startswith("shard_grad_op") else 0
        result.set_json("zero_optimization.stage", stage, *settings.only("fsdp"))
        if "offload" in words:
            result.set_json("zero_optimization.offload_param.device", "cpu", "fsdp")
    elif words:
        result.none("the JSON divides the states", "fsdp")
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if settings.is_on(name):
            result.set_run("recompute", "blocks", name)
        elif settings.has(name):
            result.used("off", name)


def _evaluation_and_saving(settings: Settings, result: Result) -> None:
    strategy = settings.text("eval_strategy", "no") if not settings.has("evaluation_strategy") else \
        settings.text("evaluation_strategy")
    names = settings.only("eval_strategy", "evaluation_strategy", "eval_steps")
    every = {"steps": settings.number("eval_steps", settings.number("logging_steps")), "no": 0}.get(strategy)
    if every is None or 0 < every < 1:
        result.none("CHECK: --eval_interval counts steps", *names)
        every = 0
    result.set_run("eval_interval", int(every), *(names or ["eval_strategy"]))
    if names and every:
        result.differs("an evaluation has --eval_steps global batches, and not all validation data", *names)
    strategy, steps = settings.text("save_strategy"), settings.number("save_steps")
    names = settings.only("save_strategy", "save_steps") or ["save_steps"]
    if strategy == "steps" and steps >= 1:
        result.set_run("save_interval", int(steps), *names)
    else:
        result.set_run("save_interval", 0, *names)
        if strategy in ("epoch", "best") or 0 < steps < 1:
            result.differs("here a checkpoint is saved at the end; --save_interval counts steps", *names)
    if settings.has("output_dir"):
        result.set_run("save", settings.text("output_dir"), "output_dir")


def _data(settings: Settings, result: Result) -> None:
    named = settings.only("train_file", "dataset_name", "train_data_path")
    parts.no_data(settings, result, *named[:2])
    for name in (*named, *settings.only("validation_file", "validation_split_percentage")):
        result.none("MATTERS: it names text or its division; see what remains to do", name)
    percent = settings.number("validation_split_percentage")
    if settings.has("validation_file"):
        result.run |= {"valid_data": f"{parts.PLACEHOLDER}/valid", "split": "100,0,0"}
        result.remaining.append(f"--valid_data: prepare {settings.text('validation_file')} as the training data")
    elif settings.has("train_file") or settings.has("dataset_name"):
        result.set_run("split", f"{100 - percent:g},{percent:g},0", "validation_split_percentage")
    name = settings.first("tokenizer_name", "tokenizer_name_or_path", "model_name_or_path")
    parts.write_tokenizer(result, settings.text(name) if name else "", *settings.only(name))


def _logging(settings: Settings, result: Result) -> None:
    parts.write_load(settings, result, "resume_from_checkpoint", "output_dir")
    targets = [word.strip("[],'\"") for word in settings.words("report_to")]
    used = settings.only("report_to")
    for word in targets:
        if word in ("tensorboard", "wandb"):
            parts.write_monitor(result, word, {}, "report_to")
        elif word == "trackio":
            project = settings.text("project", "huggingface")
            result.set_run("trackio", project, "report_to", *settings.only("project"))
        elif word not in ("none", "all"):
            result.none(f"CHECK: there is no monitor {word}", *used)
    if settings.has("run_name") and "wandb" in targets:
        result.none("DeepSpeed's monitor names the run itself; --note is a text", "run_name")
