"""Validate a run before it is launched: flags, model, JSON, data, world size and device together."""

from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.flags.arguments import RunArguments, data_spec
from pretrain.config.flags.check_flags import check_flags
from pretrain.config.flags.overrides import OverrideRecord
from pretrain.config.layout import Layout
from pretrain.config.model_of_run import (
    Origin,
    SavedModel,
    check_initialization_flags,
    model_of_run,
    undecayed_names,
    with_dropout,
)
from pretrain.config.plan_notes import json_notes, run_notes
from pretrain.config.resolve import ResolvedConfig, resolve_ds_config
from pretrain.config.run_length import RunLength
from pretrain.config.run_rules import check_rules
from pretrain.config.schedule import Schedule
from pretrain.data.data_spec import DataSpec, names_of_split, planned_samples
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.megatron import MegatronSamples
from pretrain.data.token_schedules import SeqLengths, parse_seq_lengths
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig

DEEPSPEED_VERSION = "0.19.8"


@dataclass(frozen=True)
class Plan:
    """A validated run: everything that the engine and the step loop need."""

    args: RunArguments
    ds_config: dict[str, Any]  # complete, as handed to deepspeed.initialize
    model: ModelConfig  # with the dropouts of the flags
    layout: Layout
    length: RunLength  # steps, and the global batch size of each
    datasets: dict[str, SampleDataset]  # "train"; "valid" and "test", or "valid/NAME" and "test/NAME"
    tokenizer: Tokenizer | None
    eod_token: int | None  # end-of-document token
    unigram_entropy: float | None  # nats a token, of the training data; None: no data
    seq_lengths: SeqLengths  # of training; evaluations always use --seq_length
    schedule: Schedule | None  # learning rate by applied steps; None: the JSON has its own scheduler
    notes: tuple[str, ...]  # settings that have no effect or may surprise, one line each
    given_config: dict[str, Any] = field(default_factory=dict)  # the DeepSpeed JSON as it was given
    schedule_flags: dict[str, Any] = field(default_factory=dict)  # flags or JSON keys that planned the learning rates
    overrides: tuple[OverrideRecord, ...] = ()  # changes by --override so far
    lineage: tuple[dict[str, Any], ...] = ()  # branches that led to this run, the oldest first: Branch.record
    origin: Origin | None = None  # source of the weights at step 0; None: random weights

    @property
    def data(self) -> DataSpec:
        """The data as the flags name it."""
        return data_spec(self.args)

    @property
    def train_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.length.train_steps

    @property
    def last_step(self) -> int:
        """Step after which this process stops: that of --exit_step, or the last step of the run."""
        return min(self.train_steps, self.args.exit_step or self.train_steps)

    @property
    def epochs(self) -> float:
        """Number of times that the run reads its training data."""
        return self.length.samples / self.datasets["train"].samples_per_epoch


def check_run(args: RunArguments, *, world_size: int, device: Device, saved_model: SavedModel | None = None) -> Plan:
    """Validate a run, the cheapest checks first. Raises ConfigError for the first error.

    `checkpoint.load.start.check_start` calls this function. It validates the run folder before and the weights that the
    run starts from afterwards, and finds `saved_model`, the default of --model.
    """
    resolved = resolve_run(args, world_size=world_size, device=device, saved_model=saved_model)
    needs_ends = [f"--{name}" for name in ("eod_mask_loss", "document_attention") if getattr(args, name)]
    data = open_run_data(data_spec(args), seq_length=args.seq_length, seed=args.seed, tokenizer=args.tokenizer,
                         vocab_size=resolved.model.vocab_size, needs_ends=needs_ends,
                         num_samples=planned_samples(
                             train_steps=resolved.train_steps, eval_interval=args.eval_interval,
                             eval_steps=args.eval_steps, global_batch_size=resolved.layout.global_batch_size,
                             first_sample=args.first_sample, order_samples=args.order_samples,
                             train_samples=resolved.length.samples))
    _check_order(resolved, data)
    _check_validation_data(resolved, data)
    _check_early_stopping(args, data)
    return _make_plan(resolved, data, run_notes(resolved, data))


def plan_without_data(args: RunArguments, *, world_size: int, device: Device) -> Plan:
    """Validate a run without data, tokenizer and run folder. The plan can build an engine, but cannot train."""
    resolved = resolve_run(args, world_size=world_size, device=device)
    return _make_plan(resolved, RunData({}), json_notes(resolved))


def resolve_run(args: RunArguments, *, world_size: int, device: Device,
                saved_model: SavedModel | None = None) -> ResolvedConfig:
    """Validate flags, model and JSON together. Raises ConfigError for the first error."""
    _check_deepspeed()
    check_flags(args)
    check_initialization_flags(args)
    parse_seq_lengths(args.seq_length_schedule, seq_length=args.seq_length)
    if world_size < 1:
        raise ConfigError("world size", found=world_size, expected="at least 1 rank")
    file = read_ds_config(args.deepspeed_config)
    model = with_dropout(model_of_run(args.model, args.model_overrides, saved_model), args)
    if args.seq_length > model.longest_sequence():
        source = f"--model {args.model}" if args.model or saved_model is None else saved_model.where
        raise ConfigError("--seq_length", found=args.seq_length,
                          expected=f"at most {model.max_positions}, the positions of {source}",
                          remedy=f"--model_overrides {model.key('max_positions')}={args.seq_length} gives it more")
    resolved = resolve_ds_config(file, args, model=model, world_size=world_size, device=device)
    check_rules(resolved)
    undecayed_names(args.no_weight_decay, model)
    return resolved


def _make_plan(resolved: ResolvedConfig, data: RunData, notes: tuple[str, ...]) -> Plan:
    return Plan(args=resolved.args, ds_config=resolved.config, model=resolved.model, layout=resolved.layout,
                length=resolved.length, datasets=data.datasets, tokenizer=data.tokenizer,
                eod_token=data.eod_token, unigram_entropy=data.unigram_entropy,
                seq_lengths=parse_seq_lengths(resolved.args.seq_length_schedule, seq_length=resolved.args.seq_length),
                schedule=resolved.schedule, notes=notes, given_config=resolved.file.values,
                schedule_flags=_schedule_flags(resolved))


def _schedule_flags(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return what the user asked for: the --lr_* flags, or the parameters of the JSON's scheduler that are given."""
    if resolved.schedule is None:
        given = resolved.file.get("scheduler.params", {})
        return {name: value for name, value in given.items() if value != "auto"}
    names = (f.name for f in fields(RunArguments) if "lr" in f.name.split("_"))
    return {name: value for name in names if (value := getattr(resolved.args, name)) is not None}


def _check_deepspeed() -> None:
    """Raise ConfigError for another DeepSpeed version: its keys and defects may differ from those handled here."""
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        found = "none"
    if found.split("+")[0] != DEEPSPEED_VERSION:
        raise ConfigError("deepspeed", found=f"version {found}", expected=DEEPSPEED_VERSION,
                          remedy=f"pip install deepspeed=={DEEPSPEED_VERSION}")


def _check_early_stopping(args: RunArguments, data: RunData) -> None:
    """Raise ConfigError for early stopping without validation data."""
    if args.early_stopping_patience and not names_of_split(data.datasets, "valid"):
        raise ConfigError("--early_stopping_patience", problem="the run has no validation data",
                          remedy="give --valid_data, or a --split with a second part")


def _check_order(resolved: ResolvedConfig, data: RunData) -> None:
    """Raise ConfigError if the run reads more samples than the order of Megatron-LM or GPT-NeoX has."""
    dataset, args = data.datasets["train"], resolved.args
    last = args.first_sample + resolved.length.samples
    if isinstance(dataset, MegatronSamples) and last > dataset.order_length:
        raise ConfigError("--order_samples", found=f"{args.order_samples}: an order of {dataset.order_length} samples",
                          expected=f"an order of the {last} samples that this run reads", remedy="give fewer "
                          "--train_steps; an order for more samples has other samples from the first one on")


def _check_validation_data(resolved: ResolvedConfig, data: RunData) -> None:
    """Raise ConfigError for validation data with fewer samples than one global batch."""
    args, batch = resolved.args, resolved.layout.global_batch_size
    for name in names_of_split(data.datasets, "valid"):
        samples = data.datasets[name].samples_per_epoch
        if samples < batch:
            raise ConfigError(f"--valid_data {data.datasets[name].sources[0].prefix}" if args.valid_data else "--split",
                              found=f"{samples} validation samples of --seq_length {args.seq_length}",
                              expected=f"at least {batch}, a global batch",
                              remedy="give more validation data, or --split 1,0,0 to evaluate nothing")
