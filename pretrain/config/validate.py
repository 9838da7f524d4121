"""Validate a run before it is launched: flags, model, JSON, data, world size and device together."""

from dataclasses import replace

from pretrain.active_extensions import inputs_of_extensions, notes_of_extensions, rules_of
from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.check_flags import check_flags
from pretrain.config.model_of_run import (
    SavedModel,
    check_initialization_flags,
    model_of_run,
    undecayed_names,
    with_dropout,
)
from pretrain.config.plan import Plan
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.run_rules import check_each, check_rules
from pretrain.data.data_spec import names_of_split, planned_samples
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.samples.own import OwnSamples
from pretrain.distributed.device import Device
from pretrain.distributed.requirements import check_requirements, untested_version
from pretrain.errors import ConfigError
from pretrain.model.own_models import import_own_model
from pretrain.own_code import own_loss


def check_run(args: RunArguments, *, world_size: int, device: Device, saved_model: SavedModel | None = None,
              has_weights: bool = False) -> Plan:
    """Validate a run, the cheapest checks first. Raises ConfigError for the first error.

    `checkpoint.load.start.check_start` calls this function. It validates the run folder before and the weights that the
    run starts from afterwards, and finds `saved_model`, the default of --model. `has_weights`: it begins with those
    of a checkpoint or of --init_from.
    """
    plan = check_settings(args, world_size=world_size, device=device, saved_model=saved_model)
    needs_ends = [f"--{name}" for name in ("eod_mask_loss", "document_attention") if getattr(args, name)]
    data = open_run_data(plan.data, seq_length=args.seq_length, seed=args.seed, tokenizer=args.tokenizer,
                         vocab_size=plan.model.vocab_size, needs_ends=needs_ends, can_change_model=not has_weights,
                         num_samples=planned_samples(
                             train_steps=plan.train_steps, eval_interval=args.eval_interval,
                             eval_steps=args.eval_steps, global_batch_size=plan.layout.global_batch_size,
                             first_sample=args.first_sample, order_samples=args.order_samples,
                             train_samples=plan.length.samples))
    _check_order(plan, data)
    _check_positions(plan, data)
    _check_validation_data(plan, data)
    _check_evaluations(args, data)
    plan = replace(plan, datasets=data.datasets, tokenizer=data.tokenizer, eod_token=data.eod_token,
                   data_vocab_size=data.vocab_size, unigram_entropy=data.unigram_entropy)
    check_each(rules_of(plan), plan)
    plan = replace(plan, inputs=inputs_of_extensions(plan))
    return replace(plan, notes=(*plan.notes, *data.notes, *notes_of_extensions(plan)))


def check_settings(args: RunArguments, *, world_size: int, device: Device,
                   saved_model: SavedModel | None = None) -> Plan:
    """Validate flags, model and JSON together, without data, tokenizer and run folder. Raises ConfigError.

    The plan has no data: it can build an engine, but cannot train.
    """
    check_requirements()
    untested = untested_version()
    check_flags(args)
    import_own_model(args.model, args.model_code)
    check_initialization_flags(args)
    _check_own_loss(args)
    if world_size < 1:
        raise ConfigError("world size", found=world_size, expected="at least 1 rank")
    file = read_ds_config(args.deepspeed_config)
    model = with_dropout(model_of_run(args.model, args.model_overrides, saved_model), args)
    if args.seq_length > model.longest_sequence():
        source = f"--model {args.model}" if args.model or saved_model is None else saved_model.where
        more = f"--model_overrides {model.key('max_positions')}={args.seq_length} gives it more"
        can_change = saved_model is None or model.position != "learned"  # otherwise the weights have a row for each
        raise ConfigError("--seq_length", found=args.seq_length, remedy=more if can_change else "",
                          expected=f"at most {model.max_positions}, the positions of {source}")
    plan = resolve_ds_config(file, args, model=model, world_size=world_size, device=device)
    check_rules(plan)
    undecayed_names(args.no_weight_decay, model)
    return replace(plan, notes=(untested, *plan.notes)) if untested else plan


def _check_own_loss(args: RunArguments) -> None:
    """Raise ConfigError for a --loss that cannot be imported, and for terms that it would not have."""
    if args.loss is None:
        return
    own_loss(args.loss)
    for name in ("label_smoothing", "z_loss"):
        if getattr(args, name):
            raise ConfigError(f"--{name}", problem="it is a term of the cross-entropy, which --loss replaces",
                              remedy=f"leave it out, or add it in {args.loss}")


def _check_evaluations(args: RunArguments, data: RunData) -> None:
    """Raise ConfigError for flags that need validation data, which the run does not have."""
    if args.early_stopping_patience and not names_of_split(data.datasets, "valid"):
        raise ConfigError("--early_stopping_patience", problem="the run has no validation data",
                          remedy="give --valid_data, or a --split with a second part")


def _check_order(plan: Plan, data: RunData) -> None:
    """Raise ConfigError if the run reads more samples than its order has."""
    args, order = plan.args, plan.data.order
    last = args.first_sample + plan.length.samples
    length: int | None = getattr(data.datasets["train"], "order_length", None)  # a FiniteSamples
    if order is None or length is None or last <= length:
        return
    order.check_length(plan.data, length, last)
    raise ConfigError("--order_samples", found=f"{args.order_samples}: an order of {length} samples",
                      expected=f"an order of the {last} samples that this run reads", remedy="give fewer "
                      "--train_steps; an order for more samples has other samples from the first one on")


def _check_positions(plan: Plan, data: RunData) -> None:
    """Raise ConfigError if shorter sequences would begin inside a document whose positions the user's code gives."""
    train = data.datasets["train"]
    if plan.args.seq_length_schedule and isinstance(train, OwnSamples) and train.has_positions:
        raise ConfigError("--seq_length_schedule", problem="it divides samples, and the items of --dataset_module have "
                          "positions of their own", remedy="leave the schedule or the positions out")


def _check_validation_data(plan: Plan, data: RunData) -> None:
    """Raise ConfigError for validation data with fewer samples than one global batch."""
    args, batch = plan.args, plan.layout.global_batch_size
    for name in names_of_split(data.datasets, "valid"):
        samples = data.datasets[name].samples_per_epoch
        if samples < batch:
            where = f"--valid_data {data.datasets[name].sources[0].prefix}" if args.valid_data else "--split"
            raise ConfigError(where if plan.data.module is None else plan.data.train_flag,
                              found=f"{samples} validation samples of --seq_length {args.seq_length}",
                              expected=f"at least {batch}, a global batch",
                              remedy="give more validation data, or " +
                              ("--split 1,0,0" if plan.data.module is None else f"None for {name}") +
                              " to evaluate nothing")
