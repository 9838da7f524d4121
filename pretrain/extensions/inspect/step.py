"""The tensors that enter the model at a step of a run, read by the run's own loader."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pretrain.data.loader import Loader, MicroBatch, tokens_of, wrong_labels
from pretrain.data.run_data import RunData
from pretrain.data.samples.read_order import ranges_text, recorded_read_order
from pretrain.data.token_schedules import parse_seq_lengths, recorded_batch_sizes
from pretrain.errors import counted
from pretrain.extensions.inspect.main import StepPosition

_END = "\u2016"  # marks the end of a document in a text


@dataclass(frozen=True)
class StepTensors:
    """The micro-batches of a step. Micro-batch m of data-parallel rank r is number m * ranks + r."""

    position: StepPosition
    data: RunData
    batches: list[MicroBatch]
    ids: list[int]  # ids of the samples: their places in the order of the data
    ranks: int  # data-parallel
    micro_batch_size: int  # in samples


def read_step(found: StepPosition, data: RunData) -> StepTensors:
    """Read the tensors of a step from the data of the run."""
    flags = found.start["flags"]
    sizes, ranks = found.start["batch"], found.start["layout"]["data_parallel_size"]
    lengths = parse_seq_lengths(flags.get("seq_length_schedule"), seq_length=flags["seq_length"])
    # one rank with the micro-batches of all: the normalization of the loss weights is the same
    loader = Loader(data.datasets["train"], micro_batch_size=sizes["micro_batch_size"],
                    gradient_accumulation_steps=sizes["gradient_accumulation_steps"] * ranks,
                    batch_size_at=recorded_batch_sizes(found.start).at,
                    eod_token=data.eod_token if flags.get("eod_mask_loss") else None, seq_length_at=lengths.at,
                    document_end=data.eod_token if flags.get("document_attention") else None,
                    order=recorded_read_order(flags))
    batches = loader.step(found.consumed_samples)
    loader.close()
    first, number = found.consumed_samples, len(batches) * sizes["micro_batch_size"]
    return StepTensors(found, data, batches, recorded_read_order(flags).ids(range(first, first + number)).tolist(),
                       ranks, sizes["micro_batch_size"])


def step_lines(found: StepTensors, problems: Sequence[str], *, samples: int, tokens: int) -> list[str]:
    """Return lines about a step.

    Args:
        problems: lines of `check_labels`.
        samples: number of samples to show.
        tokens: positions of each of their sequences to show.
    """
    ids, batches = found.ids, found.batches
    labels = sum(batch[1][0].numel() for batch in batches)
    num_counted = sum(int((batch[1][1] > 0).sum()) for batch in batches)
    sequences, length = batches[0][1][0].shape
    number = len(batches) // found.ranks
    is_range = ids == [*range(ids[0], ids[0] + len(ids))]
    lines = [f"step {found.position.step}: samples {f'{ids[0]} to {ids[-1]}' if is_range else ranges_text(ids)}; "
             f"{counted(found.ranks, 'data-parallel rank')}, each {number} "
             f"micro-batch{'es' * (number > 1)} of {sequences} sequences of {length} tokens",
             f"{num_counted:,} of {labels:,} labels count; each of them is "
             f"{'NOT ' * bool(problems)}the next token of its sequence", *problems]
    parts = sequences // found.micro_batch_size  # sequences of a sample
    for sample in range(min(samples, len(batches) * found.micro_batch_size)):
        number, row = divmod(sample, found.micro_batch_size)
        for sequence in range(row * parts, (row + 1) * parts):
            lines += ["", f"sample {ids[sample]}: rank {number % found.ranks}, micro-batch "
                      f"{number // found.ranks}, sequence {sequence}"]
            lines += _sequence_lines(batches[number], sequence, tokens, found.data)
    return lines


def check_labels(batches: Sequence[MicroBatch]) -> list[str]:
    """Return a line for each sequence whose labels are not its tokens shifted by one, where labels count."""
    lines = []
    for number, batch in enumerate(batches):
        tokens_BT, labels_BT, (wrong, _) = tokens_of(batch), batch[1][0], wrong_labels(batch)
        for row in torch.unique(torch.nonzero(wrong)[:, 0]).tolist():
            position = int(torch.nonzero(wrong[row])[0])
            lines.append(f"micro-batch {number}, sequence {row}: the label at position {position} is "
                         f"{int(labels_BT[row, position])}, and the next token {int(tokens_BT[row, position + 1])}")
    return lines


def _sequence_lines(batch: MicroBatch, row: int, tokens: int, data: RunData) -> list[str]:
    """Return a table of the first `tokens` positions of a sequence, and its text with marks between documents."""
    inputs, (labels_BT, weights_BT) = batch
    tokens_BT = tokens_of(batch)
    positions = inputs[1][row].tolist() if isinstance(inputs, tuple) else list(range(tokens_BT.shape[1]))
    values, labels, weights = tokens_BT[row].tolist(), labels_BT[row].tolist(), weights_BT[row].tolist()
    decode = data.tokenizer.decode if data.tokenizer else None
    lines = [f"{'position':>10} {'token':>8} {'label':>8}  counts  text"] if tokens else []
    for place in range(min(tokens, len(values))):
        text = repr(decode([values[place]])) if decode else ""
        mark = f"  {_END} end of document" if values[place] == data.eod_token else ""
        lines.append(f"{positions[place]:>10} {values[place]:>8} {labels[place]:>8}  "
                     f"{'yes' if weights[place] > 0 else 'no':>6}  {text}{mark}")
    if decode:
        lines.append("text: " + f" {_END} ".join(decode(part) for part in _documents(values, data.eod_token)))
    return lines


def _documents(tokens: list[int], eod_token: int | None) -> list[list[int]]:
    """Divide tokens after each end-of-document token."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == eod_token:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
