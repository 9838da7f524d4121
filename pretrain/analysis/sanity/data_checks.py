"""Checks of the batches that the loader returns: vocabulary, and labels shifted by one."""

from pretrain.analysis.sanity.batches import tokens_of
from pretrain.analysis.sanity.result import Result, not_made
from pretrain.config.validate import Plan
from pretrain.data.loader import MicroBatch
from pretrain.data.samples.dataset import PADDING
from pretrain.data.source_facts import source_facts
from pretrain.distributed.collectives import gather

_SAMPLES = 64  # of each data set
_SOURCES = 8  # of a blend


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
    return Result("vocabulary", needed <= vocab_size and min(gather(smallest)) >= 0,
                  f"largest token {max(gather(largest)):,}{of_tokenizer}", f"vocab_size {vocab_size:,}",
                  f"use the model's own tokenizer and data, or --model_overrides vocab_size={needed}", float(needed))


def check_labels(batches: list[MicroBatch]) -> Result:
    """Check that the label of each token that counts is the next token of the batch."""
    wrong = compared = 0
    for batch in batches:
        tokens_BT, (labels_BT, weights_BT) = tokens_of(batch), batch[1]
        counts = weights_BT[:, :-1] != 0  # labels that are padding do not count
        wrong += int(((labels_BT[:, :-1] != tokens_BT[:, 1:]) & counts).sum())
        compared += int(counts.sum())
    total, differing = sum(gather(compared)), sum(gather(wrong))
    return Result("labels", differing == 0 and total > 0, f"{differing:,} of {total:,} labels are not the next token",
                  "0", "the labels must be the tokens shifted by one: look at the batch with tools/inspect_data.py",
                  float(differing))


def check_document_ends(plan: Plan) -> Result:
    """Check that the documents of the training data end with the end-of-document token."""
    name, token = "document ends", plan.eod_token
    if token is None:
        return not_made(name, "the end-of-document token is not known")
    facts = [source_facts(source) for source in plan.datasets["train"].sources[:_SOURCES]]
    ending, total = (sum(counts) for counts in
                     zip(*((of_source.ends.get(token, 0), of_source.documents) for of_source in facts), strict=True))
    texts = "" if ending else f"; {facts[0].ends_text()}"
    return Result(name, ending > 0, f"{ending} of {total} sampled documents end with token {token}{texts}", "not 0",
                  "give the --tokenizer with which the data was prepared, or prepare the data again with this one: "
                  "generation would not end", float(ending))
