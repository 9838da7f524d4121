"""One function judges a run before it costs: JSON, flags, model, data, tokenizer, world size and device together."""

import os
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pretrain.config.arguments import RunArguments
from pretrain.config.check_flags import check_flags, check_mirror, check_save
from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.layout import Layout
from pretrain.config.resolve import ResolvedConfig, resolve_ds_config
from pretrain.config.rules import check_rules, notes
from pretrain.config.schedule import Schedule, make_schedule
from pretrain.data.dataset import SampleDataset, open_datasets
from pretrain.data.indexed import read_meta
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, load_model_config

DEEPSPEED_VERSION = "0.19.8"
SCANNED_TOKENS = 16 * 2**20  # at either end of a data file without a sidecar; more would take seconds
_CHUNK_TOKENS = 2**20
_PADDING = 256  # unused rows of the vocabulary that are usual padding: more of them get a note


@dataclass(frozen=True)
class Plan:
    """A run that has been judged: everything that the engine and the loop need, nothing left open."""

    args: RunArguments
    ds_config: dict[str, Any]  # complete, as handed to deepspeed.initialize
    model: ModelConfig
    layout: Layout
    train_steps: int
    datasets: dict[str, SampleDataset]
    tokenizer: Tokenizer | None
    eod_token: int | None
    peak_lr: float | None  # None: the JSON has its own scheduler
    schedule: Schedule | None  # learning rate by applied steps; None likewise
    notes: tuple[str, ...]  # what has no effect or may surprise, one line each

    @property
    def epochs(self) -> float:
        """How often the run sees its training data."""
        return self.train_steps * self.layout.global_batch_size / self.datasets["train"].samples_per_epoch


def check_run(args: RunArguments, *, world_size: int, device: Device) -> Plan:
    """Judge a run, the cheapest questions first. Raises ConfigError for the first thing that is wrong."""
    check_save(args.save)
    if args.checkpoint_mirror is not None:
        check_mirror(args.checkpoint_mirror, args.save)
    settings = check_settings(args, world_size=world_size, device=device)
    model = settings.model
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise _too_few(f"--tokenizer {args.tokenizer}", f"{tokenizer.vocab_size} tokens", tokenizer.vocab_size, model)
    datasets = open_datasets(args.train_data, valid_data=args.valid_data, test_data=args.test_data, split=args.split,
                             seq_length=args.seq_length, seed=args.seed)
    eod_token = _check_data(args, datasets, tokenizer, model)
    return plan_of(settings, datasets=datasets, tokenizer=tokenizer, eod_token=eod_token,
                   more_notes=(*_vocabulary_notes(tokenizer, model),
                               *_epoch_notes(settings, datasets["train"]),
                               *_evaluation_notes(args, datasets, settings.layout.global_batch_size),
                               *_speed_notes(args, model, settings, device)))


def check_settings(args: RunArguments, *, world_size: int, device: Device) -> ResolvedConfig:
    """Judge flags, JSON and model together, without data, tokenizer or run folder. Raises ConfigError."""
    _check_deepspeed()
    check_flags(args)
    if world_size < 1:
        raise ConfigError("world size", found=world_size, expected="at least 1 rank")
    file = read_ds_config(args.deepspeed_config)
    model = load_model_config(args.model, args.model_overrides)
    if args.seq_length > model.max_positions:
        raise ConfigError("--seq_length", found=args.seq_length,
                          expected=f"at most {model.max_positions}, the positions of --model {args.model}",
                          remedy=f"--model_overrides {model.key('max_positions')}={args.seq_length} gives it more")
    settings = resolve_ds_config(file, args, model=model, world_size=world_size, device=device)
    check_rules(settings)
    _check_machine_flags(args, settings, device)
    _schedule(settings)
    if args.exit_step is not None and args.exit_step > settings.train_steps:
        raise ConfigError("--exit_step", found=args.exit_step,
                          expected=f"at most the run's {settings.train_steps} steps")
    return settings


def _schedule(settings: ResolvedConfig) -> Schedule | None:
    return make_schedule(settings.args, train_steps=settings.train_steps, peak_lr=_peak_lr(settings))


def plan_of(settings: ResolvedConfig, *, datasets: dict[str, SampleDataset], tokenizer: Tokenizer | None,
            eod_token: int | None, more_notes: tuple[str, ...] = ()) -> Plan:
    """The plan of judged settings and data; without data it can build an engine, and not train."""
    return Plan(args=settings.args, ds_config=settings.config, model=settings.model, layout=settings.layout,
                train_steps=settings.train_steps, datasets=datasets, tokenizer=tokenizer, eod_token=eod_token,
                peak_lr=settings.peak_lr, schedule=_schedule(settings), notes=(*notes(settings), *more_notes))


def _check_deepspeed() -> None:
    """Another version may have other keys and other defects than those that are checked and mended here."""
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        found = "none"
    if found.split("+")[0] != DEEPSPEED_VERSION:
        raise ConfigError("deepspeed", found=f"version {found}", expected=DEEPSPEED_VERSION,
                          remedy=f"pip install deepspeed=={DEEPSPEED_VERSION}")


def _check_machine_flags(args: RunArguments, settings: ResolvedConfig, device: Device) -> None:
    if args.tf32 and (device.kind != "cuda" or settings.layout.precision != "fp32"):
        raise ConfigError("--tf32", found=f"a run in {settings.layout.precision} on {device.kind}",
                          expected="an fp32 run on cuda: nothing else multiplies in TF32", remedy="leave --tf32 out")


def _peak_lr(settings: ResolvedConfig) -> float | None:
    if settings.peak_lr is not None and settings.peak_lr <= 0:
        raise settings.error("optimizer.params.lr", "a rate above 0")
    return settings.peak_lr


def _too_few(where: str, found: str, needed: int, model: ModelConfig) -> ConfigError:
    return ConfigError(where, found=found, expected=f"at most the model's vocab_size, {model.vocab_size}",
                       remedy=f"--model_overrides vocab_size={needed}, or another --model")


def _check_data(args: RunArguments, datasets: dict[str, SampleDataset], tokenizer: Tokenizer | None,
                model: ModelConfig) -> int | None:
    """Data, tokenizer and model must mean the same tokens. Returns the end-of-document token where one is known."""
    if "train" not in datasets:
        raise ConfigError(f"--train_data {args.train_data}", found="no training tokens",
                          expected=f"at least {args.seq_length + 1} for one sample", remedy="change --split")
    eod_token = tokenizer.eod_token if tokenizer else None
    pairs = {"train_data": args.train_data, "valid_data": args.valid_data, "test_data": args.test_data}
    for (flag, prefix), name in zip(pairs.items(), ("train", "valid", "test"), strict=True):
        if not prefix:
            continue
        meta = read_meta(prefix) or {}
        if meta.get("num_tokens", datasets[name].indexed.num_tokens) != datasets[name].indexed.num_tokens:
            meta = {}  # of data that was there before
        largest = meta.get("max_token")
        largest = _largest_token(datasets[name]) if not isinstance(largest, int) else largest
        if largest >= model.vocab_size:
            raise _too_few(f"--{flag} {prefix}", f"token {largest}", largest + 1, model)
        made_with = meta.get("tokenizer_sha256")
        if tokenizer is not None and made_with is not None and made_with != tokenizer.fingerprint:
            raise ConfigError(f"--tokenizer {args.tokenizer}", expected=f"sha256 {made_with[:12]}..., that of {prefix}",
                              found=f"sha256 {tokenizer.fingerprint[:12]}...",
                              remedy=f"use {meta.get('tokenizer', 'the same tokenizer')}, or prepare the data again")
        if tokenizer is None and isinstance(meta.get("eod_token"), int):
            eod_token = meta["eod_token"]
    if args.eod_mask_loss and eod_token is None:
        raise ConfigError("--eod_mask_loss", found="no end-of-document token in the tokenizer or the data's .meta.json",
                          expected="a known one", remedy="give --tokenizer, or leave --eod_mask_loss out")
    return eod_token


def _largest_token(dataset: SampleDataset) -> int:
    """Of the first and last 16 Mi tokens of a data file. Raises ConfigError for a negative one."""
    indexed = dataset.indexed
    total = indexed.num_tokens
    starts = set(range(0, min(SCANNED_TOKENS, total), _CHUNK_TOKENS))
    starts |= set(range(max(total - SCANNED_TOKENS, 0), total, _CHUNK_TOKENS))
    chunks = (indexed.tokens(start, min(start + _CHUNK_TOKENS, total)) for start in sorted(starts))
    ranges = [(int(chunk.min()), int(chunk.max())) for chunk in chunks]
    if min(low for low, _ in ranges) < 0:
        raise ConfigError(f"{indexed.prefix}.bin", found=f"token {min(low for low, _ in ranges)}",
                          expected="no token below 0", remedy="write it again with tools/prepare_data.py")
    return max(high for _, high in ranges)


def _vocabulary_notes(tokenizer: Tokenizer | None, model: ModelConfig) -> tuple[str, ...]:
    """A vocabulary padded to a multiple of 64 or 128 is usual; a far larger one costs memory and time for nothing."""
    unused = model.vocab_size - tokenizer.vocab_size if tokenizer is not None else 0
    if tokenizer is None or unused <= max(_PADDING, tokenizer.vocab_size // 10):
        return ()
    fitting = -(-tokenizer.vocab_size // 64) * 64
    return (f"the tokenizer has {tokenizer.vocab_size:,} tokens and the model's vocabulary {model.vocab_size:,}, of "
            f"which {unused:,} are never used: --model_overrides vocab_size={fitting} makes it fit",)


def _epoch_notes(settings: ResolvedConfig, train: SampleDataset) -> tuple[str, ...]:
    epochs = settings.train_steps * settings.layout.global_batch_size / train.samples_per_epoch
    return (f"the run sees its training data {epochs:.1f} times",) if epochs > 1 else ()


def _speed_notes(args: RunArguments, model: ModelConfig, settings: ResolvedConfig, device: Device) -> tuple[str, ...]:
    """Where the operators that are faster cannot serve, and why."""
    said = []
    if args.compile_blocks and settings.layout.zero_stage == 3:
        said.append("--compile_blocks under ZeRO-3: its hooks split the graph of a block into many")
    if device.kind == "cpu" and settings.layout.precision == "bf16":
        if args.compile_blocks:
            said.append("--compile_blocks on a CPU leaves out the attention and the GELU written for CPUs")
        if model.attention_dropout > 0:
            said.append("attention dropout: torch's own attention serves, which is slower on CPUs in bf16")
        if model.activation == "gelu_tanh" and shutil.which(os.environ.get("CC", "cc")) is None:
            said.append("no C compiler: torch's own GELU serves, which takes four times as long")
    return tuple(said)


def _evaluation_notes(args: RunArguments, datasets: dict[str, SampleDataset], batch: int) -> tuple[str, ...]:
    """What is worth knowing of the evaluations. Raises ConfigError where not even one global batch is there."""
    if "valid" not in datasets:
        return ("no validation data: nothing is evaluated while training",)
    there = datasets["valid"].samples_per_epoch
    if there < batch:
        raise ConfigError("--valid_data" if args.valid_data else "--split",
                          found=f"{there} validation samples of --seq_length {args.seq_length}",
                          expected=f"at least {batch}, a global batch",
                          remedy="give more validation data, or --split 1,0,0 to evaluate nothing")
    if there < args.eval_steps * batch:
        return (f"an evaluation of {args.eval_steps * batch} samples goes round the {there} validation samples again",)
    return ()
