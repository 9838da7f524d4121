"""The flags of `pretrain/train.py`, which are also the keys of its YAML file.

What DeepSpeed's JSON owns (batch sizes, precision, ZeRO, optimizer, clipping) is not here, except for the flags
under "fills auto": they fill values that the JSON leaves at "auto", and are refused where it does not.
"""

import argparse
import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pretrain.errors import ConfigError, did_you_mean
from pretrain.flag_help import help_text


def _flag(default: Any, help: str, *, unset: str = "none", **words: str) -> Any:
    """A field with argparse's words for it. Its help ends with the default; `unset`: what it means to leave it out."""
    if default is None or default == "":
        shown = unset
    else:
        shown = "off" if default is False else f"{default:g}" if isinstance(default, float) else str(default)
    shown = shown if "required" in shown else f"default: {shown}"
    return field(default=default, metadata={"help": f"{help} ({shown})".replace("%", "%%"), **words})


@dataclass(frozen=True)
class RunArguments:
    """Everything about a run that neither the DeepSpeed JSON nor the model's config.json says."""

    # model and run folder
    deepspeed_config: str = _flag("", "DeepSpeed JSON file; comments and \"auto\" values are allowed", metavar="FILE",
                                  unset="required")
    model: str = _flag("", "preset such as gpt2, a transformers config.json, or a folder that holds one",
                       metavar="NAME", unset="required")
    model_overrides: str | None = _flag(None, "changes to the config.json, under its own keys: "
                                              "n_layer=4,vocab_size=8000", metavar="CHANGES")
    save: str = _flag("", "run folder: checkpoints, metrics.jsonl, run.json, events.jsonl", metavar="RUN",
                      unset="required")

    # data
    train_data: str = _flag("", "prefix of the .bin/.idx pair to train on", metavar="PREFIX", unset="required")
    valid_data: str | None = _flag(None, "prefix of a separate validation pair", metavar="PREFIX",
                                   unset="a part of --train_data, as --split says")
    test_data: str | None = _flag(None, "prefix of a separate test pair, evaluated once at the end", metavar="PREFIX",
                                  unset="a part of --train_data, as --split says")
    split: str = _flag("969,30,1", "proportions of train, valid and test documents in --train_data",
                       metavar="TRAIN,VALID,TEST")
    tokenizer: str | None = _flag(None, "SentencePiece .model file, or a folder with it or with tokenizer.json, "
                                        "checked against data and model, and used by tools/generate.py", metavar="PATH")
    seq_length: int = _flag(1024, "tokens in a sample")
    eod_mask_loss: bool = _flag(False, "ignore the prediction that follows an end-of-document token in the loss")

    # length and schedule
    train_steps: int | None = _flag(None, "optimizer steps of the whole run", unset="or --train_tokens: required")
    train_tokens: int | None = _flag(None, "tokens of the whole run", unset="or --train_steps: required")
    lr_schedule: str = _flag("cosine", "learning-rate schedule: cosine, linear, constant or wsd (warm-up, stable, "
                                       "decay)", metavar="NAME")
    lr_warmup_steps: int | None = _flag(None, "steps from 0 to the peak rate", unset="1% of the run")
    lr_decay_steps: int | None = _flag(None, "step at which the lowest rate is reached", unset="the run's last")
    lr_wsd_steps: int | None = _flag(None, "steps of the final decay of wsd", unset="20% of the run")
    min_lr_ratio: float = _flag(0.1, "lowest learning rate, as a fraction of the peak rate")
    seed: int = _flag(1234, "seed of initial weights, data order and dropout")

    # evaluation and logging
    log_interval: int = _flag(10, "steps between two logged steps: a line of output and a row of metrics.jsonl")
    eval_interval: int = _flag(1000, "steps between two evaluations; 0: only at the end")
    eval_steps: int = _flag(10, "global batches in an evaluation")
    deepspeed_log_level: str = _flag("error", "DeepSpeed's own messages: debug, info, warning or error",
                                     metavar="LEVEL")

    # checkpoints
    save_interval: int = _flag(1000, "steps between two checkpoints; 0: only at the end")
    resume: str = _flag("auto", "auto: from the newest checkpoint if there is one; required: never from step 0; never: "
                                "only into a run folder without checkpoints", metavar="auto|required|never")
    exit_step: int | None = _flag(None, "save and stop after this step, before the run's end")
    async_save: bool = _flag(False, "copy a checkpoint to host memory and write it while training continues")
    save_busy: str = _flag("wait", "while the previous --async_save is still being written: wait, or skip the new one",
                           metavar="wait|skip")
    save_timeout: float = _flag(1800, "seconds after which a background save counts as failed")
    keep_checkpoints: int = _flag(0, "number of newest checkpoints to keep, at least 2; 0: keep all")
    keep_every: int = _flag(0, "with --keep_checkpoints: also keep those of every N-th step; 0: none")
    keep_best: int = _flag(0, "with --keep_checkpoints: also keep the N of lowest validation loss; 0: none")
    checkpoint_mirror: str | None = _flag(None, "folder or fsspec URL (s3://...) that receives a copy of each "
                                                "checkpoint; a start takes one from there if --save has none as new",
                                          metavar="URL")

    # values for "auto" in the DeepSpeed JSON; the defaults are those of ds_auto.py
    micro_batch_size: int | None = _flag(None, "train_micro_batch_size_per_gpu, samples", unset="1")
    gradient_accumulation_steps: int | None = _flag(None, "gradient_accumulation_steps", unset="1")
    global_batch_size: int | None = _flag(None, "train_batch_size: samples a step, all ranks together",
                                          unset="follows from the two above")
    learning_rate: float | None = _flag(None, "optimizer.params.lr, the peak rate", unset="0.0003")
    weight_decay: float | None = _flag(None, "optimizer.params.weight_decay, applied to matrices only", unset="0.1")
    adam_beta1: float | None = _flag(None, "optimizer.params.betas[0]", unset="0.9")
    adam_beta2: float | None = _flag(None, "optimizer.params.betas[1]", unset="0.95")
    adam_epsilon: float | None = _flag(None, "optimizer.params.eps", unset="1e-08")
    gradient_clipping: float | None = _flag(None, "gradient_clipping, the largest global norm", unset="1.0")
    precision: str | None = _flag(None, "bf16.enabled and fp16.enabled: bf16, fp16 or fp32", unset="bf16",
                                  metavar="NAME")
    nvme_path: str | None = _flag(None, "offload_*.nvme_path: a folder on a fast local disk", metavar="FOLDER",
                                  unset="the variable DS_PRETRAIN_NVME_PATH")

    # speed and debugging
    compile_blocks: bool = _flag(False, "torch.compile each block; for cuda, where it fuses what lies between the "
                                        "matrix products")
    tf32: bool = _flag(False, "multiply fp32 matrices in TF32 (fp32 runs on cuda): faster, 10 bits of mantissa")
    plain_operators: bool = _flag(False, "disable the custom kernels for attention and MLP: slower, and more memory "
                                         "than is predicted")
    emulate_fp16: bool = _flag(False, "run fp16 on a device that has none: very slow, for tests and debugging")
    peak_tflops: float | None = _flag(None, "peak TFLOP/s of one device in this precision, for MFU",
                                      unset="known from the GPU's name")
    local_rank: int = field(default=-1, metadata={"help": argparse.SUPPRESS})  # DeepSpeed's launcher sets it


def _parser() -> Any:
    """HfArgumentParser, with its errors in our one-line form. Imported here: it takes half a second."""
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError("command line", found=message, expected="the flags that --help lists")

        def format_help(self) -> str:
            return help_text(RunArguments)

    return Parser([RunArguments], allow_abbrev=False, prog="pretrain/train.py")


def _flags_from_yaml(path: str, names: list[str]) -> list[str]:
    """The keys of a YAML file as command-line words, so that both are judged by the same parser."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", found=f"{path} ({error})", expected="a readable YAML file") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}", found=type(values).__name__, expected="a mapping of flag: value")
    words: list[str] = []
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise ConfigError(f"{path}: {key}", found="an unknown key", expected="a flag of pretrain/train.py",
                              remedy=did_you_mean(name, names))
        if isinstance(value, (dict, list)):
            raise ConfigError(f"{path}: {key}", found=repr(value), expected="a single value")
        if value is not None:
            words.append(f"--{name}={value}")
    return words


def parse_arguments(argv: list[str] | None = None) -> RunArguments:
    """Flags, with those of `--config FILE.yaml` underneath. Raises ConfigError; `--help` exits 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = [f.name for f in dataclasses.fields(RunArguments)]
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    try:
        known, words = before.parse_known_args(words)
    except SystemExit:
        raise ConfigError("--config", found="no value", expected="a YAML file") from None
    if known.config is not None:
        words = _flags_from_yaml(known.config, names) + words
    parsed, unknown = _parser().parse_args_into_dataclasses(words, return_remaining_strings=True)
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-").replace("-", "_")
        raise ConfigError(unknown[0], found="an unknown flag", expected="a flag that --help lists",
                          remedy=did_you_mean(name, names))
    return parsed
