"""The flags of `pretrain/train.py`, which are also the keys of its YAML file.

What DeepSpeed's JSON owns (batch sizes, precision, ZeRO, optimizer, clipping) is not here, except for the flags
under "fills auto": they fill values that the JSON leaves at "auto", and are refused where it does not.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pretrain.cli import LARGEST_INT, Parser, argument_error, bad_path, text, unknown_flag
from pretrain.errors import ConfigError, did_you_mean, shorten


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help.replace("%", "%%"), **metadata})


@dataclass(frozen=True)
class RunArguments:
    """Everything about a run that neither the DeepSpeed JSON nor the model's config.json says."""

    # what to train, and how
    deepspeed_config: str = _flag("", "DeepSpeed JSON file (comments and \"auto\" values allowed)")
    model: str = _flag("", "preset name, transformers config.json, or a folder that holds one")
    model_overrides: str | None = _flag(None, "changes to the config.json, in its own words: n_layer=4,vocab_size=8000")
    save: str = _flag("", "run folder: checkpoints, metrics.jsonl, run.json, events.jsonl")

    # data
    train_data: str = _flag("", "prefix of the .bin/.idx pair to train on")
    valid_data: str | None = _flag(None, "prefix of a separate validation pair (otherwise --split cuts one off)")
    test_data: str | None = _flag(None, "prefix of a separate test pair, evaluated once at the end")
    split: str = _flag("969,30,1", "shares of train, valid, test documents of --train_data where no own pair is given")
    tokenizer: str | None = _flag(None, "SentencePiece .model file, or a folder with it or with tokenizer.json")
    seq_length: int = _flag(1024, "tokens a sample")
    eod_mask_loss: bool = _flag(False, "give the prediction after an end-of-document token no loss")

    # length and schedule
    train_steps: int | None = _flag(None, "optimizer steps of the whole run")
    train_tokens: int | None = _flag(None, "tokens of the whole run, instead of --train_steps")
    lr_schedule: str = _flag("cosine", "cosine, linear, constant or wsd (warm-up, stable, decay)")
    lr_warmup_steps: int | None = _flag(None, "steps from 0 to the peak rate (default: 1% of the run)")
    lr_decay_steps: int | None = _flag(None, "step at which the lowest rate is reached (default: the run's last)")
    lr_wsd_steps: int | None = _flag(None, "steps of wsd's final decay (default: 20% of the run)")
    min_lr_ratio: float = _flag(0.1, "lowest rate as a share of the peak rate")
    seed: int = _flag(1234, "of initial weights, data order and dropout")

    # intervals, in steps
    log_interval: int = _flag(10, "steps between two rows of metrics.jsonl")
    eval_interval: int = _flag(1000, "steps between two evaluations; 0: only at the end")
    eval_steps: int = _flag(10, "global batches an evaluation")
    save_interval: int = _flag(1000, "steps between two checkpoints; 0: only at the end")
    resume: str = _flag("auto", "auto: from the newest checkpoint if there is one; required; never")
    exit_step: int | None = _flag(None, "save and stop after this step, short of the run's end")

    # checkpoints
    async_save: bool = _flag(False, "copy a checkpoint to host memory and write it while training goes on")
    save_busy: str = _flag("wait", "when the --async_save before is still being written: wait, or skip the new one")
    save_timeout: float = _flag(1800, "seconds until a background save counts as failed")
    keep_checkpoints: int = _flag(0, "newest checkpoints to keep, at least 2; 0: keep all")
    keep_every: int = _flag(0, "with --keep_checkpoints: keep those of every so many steps too; 0: none")
    keep_best: int = _flag(0, "with --keep_checkpoints: keep those of lowest validation loss too; 0: none")
    checkpoint_mirror: str | None = _flag(None, "folder or fsspec URL (s3://...) that gets a copy of each checkpoint, "
                                                "and gives one back where --save has none as new")

    # fills "auto" in the DeepSpeed JSON
    micro_batch_size: int | None = _flag(None, "train_micro_batch_size_per_gpu: samples")
    gradient_accumulation_steps: int | None = _flag(None, "gradient_accumulation_steps")
    global_batch_size: int | None = _flag(None, "train_batch_size: samples a step, all ranks together")
    learning_rate: float | None = _flag(None, "optimizer.params.lr: the peak rate")
    weight_decay: float | None = _flag(None, "optimizer.params.weight_decay (matrices only)")
    adam_beta1: float | None = _flag(None, "optimizer.params.betas[0]")
    adam_beta2: float | None = _flag(None, "optimizer.params.betas[1]")
    adam_epsilon: float | None = _flag(None, "optimizer.params.eps")
    gradient_clipping: float | None = _flag(None, "gradient_clipping: largest global norm")
    precision: str | None = _flag(None, "bf16.enabled and fp16.enabled: bf16, fp16 or fp32")
    nvme_path: str | None = _flag(None, "offload_*.nvme_path: a folder on a fast local disk (or DS_PRETRAIN_NVME_PATH)")

    # machine
    compile_blocks: bool = _flag(False, "torch.compile each block: one graph for all of them; for cuda, where it fuses "
                                        "what lies between the matrix products")
    tf32: bool = _flag(False, "multiply fp32 matrices in TF32 (cuda, fp32 runs): faster, 10 bits of mantissa")
    plain_operators: bool = _flag(False, "attention and MLP by torch's own operators, to rule ours out: slower, and "
                                         "more memory than is predicted")
    emulate_fp16: bool = _flag(False, "run fp16 on a device that has none: very slow, for tests and debugging")
    peak_tflops: float | None = _flag(None, "peak TFLOP/s of one device in this precision, for MFU (default: by name)")
    deepspeed_log_level: str = _flag("error", "DeepSpeed's own messages: debug, info, warning, error")
    local_rank: int = _flag(-1, "set by DeepSpeed's launcher; not for users")


_PATHS = ("deepspeed_config", "model", "save", "train_data", "valid_data", "test_data", "tokenizer", "nvme_path",
          "checkpoint_mirror")
_STRINGS = {f.name: f.type in (str, "str", str | None, "str | None") for f in dataclasses.fields(RunArguments)}


def _parser() -> Any:
    """HfArgumentParser, with its errors in our one-line form. Imported here: it takes half a second."""
    from transformers.hf_argparser import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise argument_error(message, self._option_string_actions)

    return Parser([RunArguments], allow_abbrev=False, prog="pretrain/train.py",
                  description="Pretrain a GPT-style model. --config FILE.yaml holds the same keys; flags win.")


def read_yaml(path: str) -> dict[str, tuple[int, str]]:
    """Key -> (line, value as the command line would give it) of a run's YAML file; keys without a value are left out.

    Keys are spelt with _. Raises ConfigError for what is no mapping of single values, and for a key twice.
    """
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8-sig"))
        document = loader.get_single_node()
        if document is None:
            return {}
        if not isinstance(document, yaml.MappingNode):
            raise ConfigError(f"--config {path}", found=_kind(document), expected="a mapping of flag: value")
        _check_twice(path, document)
        loader.flatten_mapping(document)  # what `<<: *name` merges comes first: later keys win
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


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _check_twice(path: str, document: yaml.MappingNode) -> None:
    """Raises ConfigError for a key that stands there twice, under either spelling: YAML would take the last one."""
    lines: dict[str, int] = {}
    for key, _ in document.value:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name}", problem=f"the key stands on line {lines[name]} already",
                              remedy="remove one of the two")
        lines[name] = line


def _yaml_value(loader: yaml.SafeLoader, path: str, key: yaml.Node, value: yaml.Node) -> str | None:
    """A scalar as a flag's word; None for null. Where a string is wanted, `no` and 0123 stay what they are."""
    where = f"{path}:{key.start_mark.line + 1}: {key.value}"
    if not isinstance(value, yaml.ScalarNode):
        raise ConfigError(where, found=_kind(value), expected="a single value")
    try:
        meant = loader.construct_object(value)
    except ValueError:  # a date such as 2024-99-99, or thousands of digits: its type's parser rejects the text
        meant = value.value
    if meant is None:
        return None
    wants_text = _STRINGS.get(str(key.value).replace("-", "_"), False)
    return str(value.value) if wants_text else str(meant)


def _flags_from_yaml(path: str, names: list[str]) -> list[str]:
    """The keys of a YAML file as command-line words, so that both are validated by the same parser."""
    words = []
    for name, (line, value) in read_yaml(path).items():
        if name not in names:
            raise ConfigError(f"{path}:{line}: {shorten(name)}", found="an unknown key",
                              expected="a flag of pretrain/train.py", remedy=did_you_mean(name, names))
        words.append(f"--{name}={value}")
    return words


def _check_values(parsed: RunArguments) -> None:
    """What is wrong for every flag of a type: numbers that no file can hold, empty text, paths that are none."""
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
            raise ConfigError(flag, problem=f"{shorten(value)!r} holds a NUL character")
        if f.name in _PATHS and (problem := bad_path(value)):
            raise ConfigError(flag, problem=problem)


def parse_arguments(argv: list[str] | None = None) -> RunArguments:
    """Flags, with those of `--config FILE.yaml` underneath. Raises ConfigError; `--help` exits 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = [f.name for f in dataclasses.fields(RunArguments)]
    before = Parser(add_help=False)
    before.add_argument("--config", action="append", type=text)
    known, words = before.parse_known_args(words)
    if known.config and len(known.config) > 1:
        raise ConfigError("--config", found=f"{len(known.config)} files", expected="one", remedy="join them into one")
    if known.config:
        words = _flags_from_yaml(known.config[0], names) + words
    parsed, unknown = _parser().parse_args_into_dataclasses(words, return_remaining_strings=True)
    if unknown:
        raise unknown_flag(unknown[0], [f"--{name}" for name in names])
    _check_values(parsed)
    return parsed
