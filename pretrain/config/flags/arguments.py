"""Flags of `pretrain/train.py`, which are also the keys of its YAML file.

Settings of the DeepSpeed JSON (batch sizes, precision, ZeRO, optimizer, clipping) have no flags. The exceptions are in
`AutoArguments`: these flags fill keys that the JSON leaves out or sets to "auto".
"""

import argparse
import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from pretrain.cli import LARGEST_INT, Parser, argument_error, bad_path, text, unknown_flag
from pretrain.config.flags.flag_help import help_text
from pretrain.errors import ConfigError, shorten


def _flag(default: Any, help: str, *, unset: str = "none", **metadata: str) -> Any:
    """Return a dataclass field whose help text ends with the default. `unset` is shown if there is no default."""
    if default is None or default == "":
        shown = unset
    else:
        shown = "off" if default is False else f"{default:g}" if isinstance(default, float) else str(default)
    shown = shown if "required" in shown else f"default: {shown}"
    return field(default=default, metadata={"help": f"{help} ({shown})".replace("%", "%%"), **metadata})


@dataclass(frozen=True)
class ModelArguments:
    title: ClassVar[str] = "model and run folder"

    deepspeed_config: str = _flag("", "DeepSpeed JSON file; comments and \"auto\" values are allowed", metavar="FILE",
                                  unset="required")
    model: str = _flag("", "preset such as gpt2, a transformers config.json, a folder that holds one, or a repository "
                           "of the Hub (org/name)", metavar="NAME",
                       unset="without --init_from: required")
    model_overrides: str | None = _flag(None, "changes to the config.json, under its own keys: "
                                              "n_layer=4,vocab_size=8000", metavar="CHANGES")
    init_from: str | None = _flag(None, "start at step 0 from these weights: a transformers folder with safetensors, a "
                                        "repository of the Hub (org/name), a run folder or a global_stepN folder",
                                  metavar="SOURCE", unset="random weights")
    save: str = _flag("", "run folder: checkpoints, metrics.jsonl, run.json, events.jsonl", metavar="RUN",
                      unset="required")


@dataclass(frozen=True)
class DataArguments:
    title: ClassVar[str] = "data"

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


@dataclass(frozen=True)
class ScheduleArguments:
    title: ClassVar[str] = "length and schedule"

    train_steps: int | None = _flag(None, "optimizer steps of the whole run", unset="this or --train_tokens: required")
    train_tokens: int | None = _flag(None, "tokens of the whole run", unset="this or --train_steps: required")
    lr_schedule: str = _flag("cosine", "learning-rate schedule: cosine, linear, constant or wsd (warm-up, stable, "
                                       "decay)", metavar="NAME")
    lr_warmup_steps: int | None = _flag(None, "steps from 0 to the peak rate", unset="1% of the run")
    lr_decay_steps: int | None = _flag(None, "step at which the lowest rate is reached", unset="the run's last")
    lr_wsd_steps: int | None = _flag(None, "steps of the final decay of wsd", unset="20% of the run")
    min_lr_ratio: float = _flag(0.1, "lowest learning rate, as a fraction of the peak rate")
    seed: int = _flag(1234, "seed of initial weights, data order and dropout")


@dataclass(frozen=True)
class InitArguments:
    title: ClassVar[str] = "initial weights and dropout"
    description: ClassVar[str] = "Settings of the training only: an exported config.json does not change."

    init_method: str = _flag("config", "initial values of matrices: config (as the config.json says), normal, "
                                       "scaled_normal, small_init, wang_init, xavier_normal or xavier_uniform",
                             metavar="NAME")
    output_init_method: str = _flag("config", "the same for the projections into the residual stream", metavar="NAME")
    init_std: float | None = _flag(None, "standard deviation of config, normal and scaled_normal",
                                   unset="initializer_range of the config.json")
    mup_base_width: int | None = _flag(None, "muP: hidden size of the smaller model whose learning rate and "
                                             "standard deviation were tuned", unset="without muP")
    embedding_dropout: float | None = _flag(None, "dropout of the embeddings", unset="that of the config.json")
    attention_dropout: float | None = _flag(None, "dropout of the attention probabilities",
                                            unset="that of the config.json")
    residual_dropout: float | None = _flag(None, "dropout of the outputs of attention and MLP",
                                           unset="that of the config.json")


@dataclass(frozen=True)
class LoggingArguments:
    title: ClassVar[str] = "evaluation and logging"

    log_interval: int = _flag(10, "steps between two logged steps: a line of output and a row of metrics.jsonl")
    eval_interval: int = _flag(1000, "steps between two evaluations; 0: only at the end")
    eval_steps: int = _flag(10, "global batches in an evaluation")
    deepspeed_log_level: str = _flag("error", "DeepSpeed's own messages: debug, info, warning or error",
                                     metavar="LEVEL")


@dataclass(frozen=True)
class CheckpointArguments:
    title: ClassVar[str] = "checkpoints"

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
                                                "checkpoint; a start takes one from there if --save has none as recent",
                                          metavar="URL")


@dataclass(frozen=True)
class AutoArguments:
    """The defaults in these help texts are those of `auto.py`."""

    title: ClassVar[str] = 'values for "auto"'
    description: ClassVar[str] = ('Each fills a key that the DeepSpeed JSON leaves out or at "auto", and is rejected '
                                  'where the JSON has another value. The default is that of "auto".')

    micro_batch_size: int | None = _flag(None, "train_micro_batch_size_per_gpu, samples", unset="1")
    gradient_accumulation_steps: int | None = _flag(None, "gradient_accumulation_steps", unset="1")
    global_batch_size: int | None = _flag(None, "train_batch_size: samples a step, all ranks together",
                                          unset="follows from the two above")
    learning_rate: float | None = _flag(None, 'optimizer.params.lr, the peak rate; required if the JSON has no '
                                              '"optimizer"', unset="0.0003")
    weight_decay: float | None = _flag(None, "optimizer.params.weight_decay, applied to matrices only", unset="0.1")
    adam_beta1: float | None = _flag(None, "optimizer.params.betas[0]", unset="0.9")
    adam_beta2: float | None = _flag(None, "optimizer.params.betas[1]", unset="0.95")
    adam_epsilon: float | None = _flag(None, "optimizer.params.eps", unset="1e-08")
    gradient_clipping: float | None = _flag(None, "gradient_clipping, the largest global norm", unset="1.0")
    precision: str | None = _flag(None, "bf16.enabled and fp16.enabled: bf16, fp16 or fp32", unset="bf16",
                                  metavar="NAME")
    nvme_path: str | None = _flag(None, "offload_*.nvme_path: a folder on a fast local disk", metavar="FOLDER",
                                  unset="the variable DS_PRETRAIN_NVME_PATH")


@dataclass(frozen=True)
class SpeedArguments:
    title: ClassVar[str] = "speed and debugging"

    compile_blocks: bool = _flag(False, "torch.compile each block; for cuda, where it fuses what lies between the "
                                        "matrix products")
    tf32: bool = _flag(False, "multiply fp32 matrices in TF32 (fp32 runs on cuda): faster, 10 bits of mantissa")
    plain_operators: bool = _flag(False, "disable the custom kernels for attention and MLP: slower, and more memory "
                                         "than is predicted")
    emulate_fp16: bool = _flag(False, "run fp16 on a device that has none: very slow, for tests and debugging")
    peak_tflops: float | None = _flag(None, "peak TFLOP/s of one device in this precision, for MFU",
                                      unset="known from the GPU's name")
    local_rank: int = field(default=-1, metadata={"help": argparse.SUPPRESS})  # set by DeepSpeed's launcher


GROUPS = (ModelArguments, DataArguments, ScheduleArguments, InitArguments, LoggingArguments, CheckpointArguments,
          AutoArguments, SpeedArguments)


@dataclass(frozen=True)
class RunArguments(SpeedArguments, AutoArguments, CheckpointArguments, LoggingArguments, InitArguments,
                   ScheduleArguments, DataArguments, ModelArguments):
    """All flags of a run.

    The base classes are in reverse order, because a dataclass takes the fields of its last base first.
    """


_PATHS = ("deepspeed_config", "model", "init_from", "save", "train_data", "valid_data", "test_data", "tokenizer",
          "nvme_path", "checkpoint_mirror")
_TEXT_FLAGS = {f.name for f in dataclasses.fields(RunArguments) if f.type in (str, str | None)}


def _parser() -> Any:
    """Return an HfArgumentParser that raises ConfigErrors. The import is in here, because it takes half a second."""
    from transformers.hf_argparser import HfArgumentParser

    class FlagParser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise argument_error(message, self._option_string_actions)

        def format_help(self) -> str:
            return help_text(GROUPS)

    return FlagParser([RunArguments], allow_abbrev=False, prog="pretrain/train.py")


def read_yaml(path: str) -> dict[str, tuple[int, str]]:
    """Read a run's YAML file. Returns key -> (line number, value as it would be written on the command line).

    Keys are returned with _ instead of -. Keys without a value are left out.
    Raises ConfigError unless the file maps unique keys to single values.
    """
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8-sig"))
        document = loader.get_single_node()
        if document is None:
            return {}
        if not isinstance(document, yaml.MappingNode):
            raise ConfigError(f"--config {path}", found=_node_type(document), expected="a mapping of flag: value")
        _check_unique(path, document)
        loader.flatten_mapping(document)  # keys merged by `<<: *name` come first: later keys win
        entries = [(str(key.value).replace("-", "_"), key.start_mark.line + 1, _yaml_value(loader, path, key, value))
                   for key, value in document.value]
    except RecursionError:
        raise ConfigError(f"--config {path}", problem="it is nested too deeply", remedy="each key takes one value") \
            from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}", problem="it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}", problem=f"it is not YAML: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {path}", problem=f"the file cannot be read: {reason}") from None
    return {name: (line, value) for name, line, value in entries if value is not None}


def _node_type(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _check_unique(path: str, document: yaml.MappingNode) -> None:
    """Raise ConfigError for a key that occurs twice, with - or _: YAML would silently use the last one."""
    lines: dict[str, int] = {}
    for key, _ in document.value:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name}", problem=f"the same key is on line {lines[name]}",
                              remedy="remove one of the two")
        lines[name] = line


def _yaml_value(loader: yaml.SafeLoader, path: str, key: yaml.Node, value: yaml.Node) -> str | None:
    """Return a scalar as it would be written on the command line, or None for null.

    For text flags, `no` and 0123 keep their spelling.
    """
    where = f"{path}:{key.start_mark.line + 1}: {key.value}"
    if not isinstance(value, yaml.ScalarNode):
        raise ConfigError(where, found=_node_type(value), expected="a single value")
    try:
        parsed = loader.construct_object(value)
    except ValueError:  # a date such as 2024-99-99, or thousands of digits: the type of the flag rejects the text
        parsed = value.value
    if parsed is None:
        return None
    is_text = str(key.value).replace("-", "_") in _TEXT_FLAGS
    return str(value.value) if is_text else str(parsed)


def _flags_from_yaml(path: str, names: list[str]) -> list[str]:
    """Return the keys of a YAML file as command-line words, so that one parser validates both."""
    words = []
    for name, (line, value) in read_yaml(path).items():
        if name not in names:
            raise ConfigError(f"{path}:{line}: {shorten(name)}", found="an unknown key",
                              expected="a flag of pretrain/train.py", word=name, known=names)
        words.append(f"--{name}={value}")
    return words


def _check_values(parsed: RunArguments) -> None:
    """Raise ConfigError for infinite numbers, integers beyond 64 bits, empty text and invalid paths."""
    for f in dataclasses.fields(parsed):
        value, flag = getattr(parsed, f.name), f"--{f.name}"
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(flag, found=value, expected="a finite number")
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ConfigError(flag, found=value, expected=f"a whole number of at most {LARGEST_INT}")
        if not isinstance(value, str) or value == f.default:
            continue
        if not value:
            raise ConfigError(flag, problem="the value is empty", remedy="leave the flag out, or give it a value")
        if "\0" in value:
            raise ConfigError(flag, problem=f"{shorten(value)!r} contains a NUL character")
        if f.name in _PATHS and (problem := bad_path(value)):
            raise ConfigError(flag, problem=problem)


def parse_arguments(argv: list[str] | None = None) -> RunArguments:
    """Parse the flags and the `--config` YAML file; flags win. Raises ConfigError; `--help` exits with 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = [f.name for f in dataclasses.fields(RunArguments)]
    config_parser = Parser(add_help=False)
    config_parser.add_argument("--config", action="append", type=text)
    known, words = config_parser.parse_known_args(words)
    if known.config and len(known.config) > 1:
        raise ConfigError("--config", found=f"{len(known.config)} files", expected="one", remedy="join them into one")
    if known.config:
        words = _flags_from_yaml(known.config[0], names) + words
    parsed, unknown = _parser().parse_args_into_dataclasses(words, return_remaining_strings=True)
    if unknown:
        raise unknown_flag(unknown[0], [f"--{name}" for name in names])
    _check_values(parsed)
    return parsed
