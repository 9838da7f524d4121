"""Checks of the loader's batches, and of the forward pass: loss, causal mask, activations, modes, layout.

V is the vocabulary size, and D the hidden size.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pretrain.active_extensions import advice_on
from pretrain.config.model_of_run import initialization_of
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch, tokens_of, wrong_labels
from pretrain.data.samples.dataset import PADDING
from pretrain.data.source_facts import source_facts
from pretrain.distributed.collectives import gather
from pretrain.engine.examine import layers_of
from pretrain.engine.steps import eval_batch, train_batch
from pretrain.extensions.sanity.batches import half_labels, only_at, with_labels, with_tokens
from pretrain.extensions.sanity.checked_engine import CheckedEngine
from pretrain.extensions.sanity.extension import Result, not_made
from pretrain.model.layers.vocabulary import Head

_LOSS_MARGIN = 0.25  # nats
_LARGEST_LOSS = 1.5  # times ln(V)
_FUTURE = 1e-5  # relative change of a loss that counts as rounding
_DIFFERENCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}  # relative, of losses in another division of the batch
# largest activations: initial weights give 0.001 to 10 in all families; outputs of published ones can be a thousand
_RMS, _LOADED_RMS = (1e-4, 100.0), (1e-5, 1e4)
_SAMPLES = 64  # samples of each data set
_SOURCES = 8  # sources of a blend


def check_initial_loss(checked: CheckedEngine, batches: list[MicroBatch]) -> Result:
    """Compare the loss of the first global batch with ln(V), the loss of equal probabilities."""
    loss, plan = checked.loss(batches), checked.plan
    low, high = loss_bounds(plan, repeated=_repeated_tokens(batches))
    origin = "of the loaded weights" if plan.origin else "at initialization"
    if loss == 0:
        remedy = "; ".join(["no text is so predictable: the labels are visible in the input, or the device computes "
                            "nothing", *advice_on("device")])
        return Result("initial loss", False, f"0 nats {origin}", "above 0", remedy, 0.0)
    return Result("initial loss", low <= loss <= high, f"{loss:.4f} nats {origin}",
                  f"{low:.2f} to {high:.2f}; ln({plan.model.vocab_size}) = {math.log(plan.model.vocab_size):.2f}",
                  "too high: the initial weights or the output layer are scaled wrongly (--init_std, --init_method), "
                  "or the loaded weights do not fit the tokenizer; too low: the labels are visible in the input", loss)


def _repeated_tokens(batches: list[MicroBatch]) -> float:
    """Return the fraction of the positions whose label is their own token; collective."""
    equal = torch.cat([(batch[1][0] == tokens_of(batch)).flatten() for batch in batches])
    fractions = gather(float(equal.float().mean()))
    return sum(fractions) / len(fractions)


def loss_bounds(plan: Plan, *, repeated: float = 0.0) -> tuple[float, float]:
    """Return the lowest and highest plausible initial loss in nats.

    The final norm has outputs of about unit variance. With an output matrix of standard deviation std, a logit then
    has the variance v = D * std^2, and the expected loss is ln(V) + v / 2. With tied embeddings, the logit of the
    input token is at most D * std larger: its embedding remains in the residual stream, and has the norm
    sqrt(D) * std. This is an upper limit, because the blocks add to the residual stream. Where the next token is the
    same one (a fraction `repeated` of the positions), the loss is lower by up to this value. A loss far above ln(V) is
    never plausible: the model would first have to unlearn its initial weights. Loaded weights must be better than equal
    probabilities.
    """
    log_v, model = math.log(plan.model.vocab_size), plan.model
    if plan.origin is not None:
        return 0.0, log_v
    std = model.implementation.output_std(model, initialization_of(plan.args))
    if std is None:
        return log_v / 2, _LARGEST_LOSS * log_v
    variance = model.hidden_size * std ** 2
    own_token = model.hidden_size * std if model.tie_word_embeddings else 0.0
    if model.logit_softcap:
        variance, own_token = min(variance, model.logit_softcap ** 2), min(own_token, model.logit_softcap)
    log_sum = max(log_v, own_token) + math.log1p(math.exp(-abs(log_v - own_token)))
    expected = (log_sum if own_token else log_v) + variance
    low = max(0.0, log_v - repeated * own_token)
    return low - _LOSS_MARGIN, min(expected + _LOSS_MARGIN, _LARGEST_LOSS * log_v)


def check_causal_mask(checked: CheckedEngine, batches: list[MicroBatch]) -> Result:
    """Check that other tokens in the second half of a sequence do not change the losses before them.

    The same tokens must change the losses after them: otherwise the check would prove nothing.
    """
    batch = batches[0]
    tokens_BT = tokens_of(batch)
    length = tokens_BT.shape[1]
    middle = length // 2
    if middle == 0:
        return not_made("causal mask", "a sequence has one token")
    changed_BT = tokens_BT.clone()
    changed_BT[:, middle:] = (changed_BT[:, middle:] + 1 + tokens_BT[:, :1]) % checked.plan.model.vocab_size
    other = with_tokens(batch, changed_BT)
    before, after = max(0, middle - max(1, length // 8)), min(length, middle + max(1, length // 8))
    losses = [checked.loss([only_at(which, first, last)])
              for first, last in ((before, middle), (middle, after)) for which in (batch, other)]
    past, future = abs(losses[1] - losses[0]) / losses[0], abs(losses[3] - losses[2]) / losses[2]
    return Result("causal mask", past <= _FUTURE < future,
                  f"relative change of earlier losses {past:.1e}, of later losses {future:.1e}",
                  f"at most {_FUTURE:.0e}, and more than {_FUTURE:.0e}",
                  "a token sees later tokens (or none): check the mask and the attention operator; compare with "
                  "--plain_operators", past)


def check_loss_positions(checked: CheckedEngine, batches: list[MicroBatch]) -> Result:
    """Check that the loss of a position uses the label of this position: another shift in the model would show."""
    batch = batches[0]
    labels_BT, weights_BT = only_at(batch, 0, 1)[1]
    base = checked.loss([with_labels(batch, labels_BT, weights_BT)])
    changes = []
    for first, last in ((0, 1), (1, labels_BT.shape[1])):  # the own label, the other labels
        other_BT = labels_BT.clone()
        other_BT[:, first:last] = (other_BT[:, first:last] + 1) % checked.plan.model.vocab_size
        changes.append(abs(checked.loss([with_labels(batch, other_BT, weights_BT)]) - base) / base)
    own, others = changes
    return Result("label positions", others <= _FUTURE < own,
                  f"change by the own label {own:.1e}, by other labels {others:.1e}",
                  f"more than {_FUTURE:.0e}, and at most {_FUTURE:.0e}",
                  "the model shifts the labels that the loader has already shifted", others)


def check_layout(checked: CheckedEngine, batches: list[MicroBatch], consumed_samples: int) -> Result:
    """Compare the loss of a global batch with its loss in other divisions.

    These are micro-batches of one sample, exchanged ranks, and the sum of the losses of the even and of the odd
    positions: the weights hold the normalization, so that another one inside the model would count twice.
    """
    layout = checked.plan.layout
    accumulation = layout.micro_batch_size * layout.gradient_accumulation_steps
    divided = checked.batches(consumed_samples, micro_batch_size=1, gradient_accumulation_steps=accumulation)
    loss = checked.loss(batches)
    others = {"micro-batches of one sample": checked.loss(divided),
              "halves of the labels": sum(checked.loss(half_labels(batches, remainder)) for remainder in (0, 1))}
    if layout.data_parallel_size > 1:
        others["exchanged ranks"] = checked.loss(_batches_of_next_rank(checked, batches))
    differences = {way: abs(other - loss) / loss for way, other in others.items()}
    way = max(differences, key=lambda way: differences[way])
    difference, bound = differences[way], _DIFFERENCE[layout.precision]
    return Result("layout", difference <= bound, f"relative difference {difference:.1e} ({way})", f"at most {bound:g}",
                  "the loss depends on the division of the batch: it must be normalized by the tokens of the global "
                  "batch, not of the micro-batch, and a sample must not see other samples", difference)


def _batches_of_next_rank(checked: CheckedEngine, batches: list[MicroBatch]) -> list[MicroBatch]:
    group = checked.engine.data_parallel_group
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, batches, group=group)
    next_rank: list[MicroBatch] = of_ranks[(dist.get_rank(group) + 1) % len(of_ranks)]
    return next_rank


def check_activations(checked: CheckedEngine, batches: list[MicroBatch]) -> Result:
    """Check that the outputs of all layers are finite, and neither vanish nor explode."""
    found: dict[str, float] = {}

    def record(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.dim() == 3:
            found.setdefault(name, float(tensor.float().square().mean().sqrt()))  # NaN or infinite if any element is

    handles = [module.register_forward_hook(lambda _, __, output, name=name: record(name, output))
               for name, module in layers_of(checked.engine.module).items() if not isinstance(module, Head)]
    try:
        checked.loss(batches)
    finally:
        for handle in handles:
            handle.remove()
    merged = {name: rms for of_rank in gather(found) for name, rms in of_rank.items()}
    if not merged:
        return not_made("activations", "no layer was observed")
    smallest, largest = _RMS if checked.plan.origin is None else _LOADED_RMS
    bad = [name for name, rms in merged.items() if not smallest <= rms <= largest]
    low, high = (of(merged, key=lambda name: merged[name]) for of in (min, max))
    measured = f"rms {merged[low]:.2g} ({low}) to {merged[high]:.2g} ({high})"
    return Result("activations", not bad, measured + (f"; wrong: {', '.join(bad[:4])}" if bad else ""),
                  f"finite, {smallest:g} to {largest:g} in {len(merged)} layers",
                  "the initial weights are too large or too small, or a norm is missing: see --init_method",
                  merged[high])


def check_modes(checked: CheckedEngine, batches: list[MicroBatch]) -> Result:
    """Check that an evaluation runs in evaluation mode, and that the training step after it runs in training mode."""
    modes: list[set[bool]] = []

    def record(module: nn.Module, _: Any) -> None:
        modes.append({part.training for part in module.modules()})

    handle = checked.engine.module.register_forward_pre_hook(record)
    try:
        eval_batch(checked.engine, batches)
        num_eval = len(modes)
        train_batch(checked.engine, batches)
    finally:
        handle.remove()
    right = all(mode == {False} for mode in modes[:num_eval]) and all(mode == {True} for mode in modes[num_eval:])
    seen = "evaluation mode" if any(False in mode for mode in modes[num_eval:]) else "training mode"
    passed = all(gather(right and 0 < num_eval < len(modes)))
    return Result("modes", passed, f"training after an evaluation runs in {seen}",
                  "evaluation mode in the evaluation, training mode after it",
                  "call train() before the training step: without it, dropout remains off after the first evaluation")


def check_vocabulary(plan: Plan, batches: list[MicroBatch]) -> Result:
    """Check that all tokens are below the model's vocabulary size, and that the tokenizer has no more tokens."""
    vocab_size, largest, smallest = plan.model.vocab_size, 0, 0
    for batch in batches:
        for column in (tokens_of(batch), batch[1][0]):
            largest, smallest = max(largest, int(column.max())), min(smallest, int(column.min()))
    for dataset in plan.datasets.values():
        samples = dataset.samples(range(_SAMPLES))
        samples = samples[samples != PADDING]
        largest = max(largest, int(samples.max(initial=0)))
    known = plan.tokenizer.vocab_size if plan.tokenizer is not None else 0
    ends = plan.eod_token if plan.eod_token is not None else 0
    needed = max(gather(max(largest + 1, known, ends + 1)))
    of_tokenizer = f"; {known:,} in the tokenizer" if known else ""
    larger = f", or --model_overrides vocab_size={needed}" if plan.args.init_from is None else ""
    return Result("vocabulary", needed <= vocab_size and min(gather(smallest)) >= 0,
                  f"largest token {max(gather(largest)):,}{of_tokenizer}", f"vocab_size {vocab_size:,}",
                  f"use the model's own tokenizer and data{larger}", float(needed))


def check_labels(batches: list[MicroBatch]) -> Result:
    """Check that the label of each token that counts is the next token of the batch."""
    wrong = compared = 0
    for batch in batches:
        differ, counts = wrong_labels(batch)
        wrong += int(differ.sum())
        compared += int(counts.sum())
    total, differing = sum(gather(compared)), sum(gather(wrong))
    return Result("labels", differing == 0 and total > 0, f"{differing:,} of {total:,} labels are not the next token",
                  "0", "the labels must be the tokens shifted by one: look at the batch with `ds-pretrain inspect`",
                  float(differing))


def check_document_ends(plan: Plan) -> Result:
    """Check that the documents of the training data end with the end-of-document token."""
    name, token = "document ends", plan.eod_token
    if token is None:
        return not_made(name, "the end-of-document token is not known")
    if not plan.datasets["train"].sources:
        return not_made(name, "a dataset of --dataset_module has no token files")
    facts = [source_facts(source) for source in plan.datasets["train"].sources[:_SOURCES]]
    ending, total = (sum(counts) for counts in
                     zip(*((of_source.ends.get(token, 0), of_source.documents) for of_source in facts), strict=True))
    texts = "" if ending else f"; {facts[0].ends_text()}"
    return Result(name, ending > 0, f"{ending} of {total} sampled documents end with token {token}{texts}", "not 0",
                  "give the --tokenizer with which the data was prepared, or prepare the data again with this one: "
                  "generation would not end", float(ending))
