"""The sample orders of Megatron-LM and GPT-NeoX by their definition, in plain loops."""

import math

import numpy as np


def epochs_needed(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    epochs = 1
    while epochs * tokens_per_epoch < num_samples * seq_length + 1:
        epochs += 1
    return epochs


def reference(order: str, documents: list[list[int]], seq_length: int, seed: int, num_samples: int) -> list[list[int]]:
    """Return all samples of an order: one token after another, one document after another."""
    tokens_per_epoch = sum(map(len, documents))
    epochs = epochs_needed(tokens_per_epoch, seq_length, num_samples)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    is_separate = False
    if order == "megatron" and epochs > 1:
        is_separate = num_samples - before_last < int(0.80 * ((tokens_per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    document_order: list[int] = []
    for count in [epochs - 1, 1] if is_separate else [epochs]:
        part = np.array(list(range(len(documents))) * count)
        random.shuffle(part)
        document_order += part.tolist()
    stream = [token for number in document_order for token in documents[number]]
    samples, first = [], 0
    while first + seq_length + 1 <= len(stream):
        samples.append(stream[first:first + seq_length + 1])
        first += seq_length
    shuffled = []
    for low, high in [(0, before_last), (before_last, len(samples))] if is_separate else [(0, len(samples))]:
        numbers = np.arange(low, high)
        random.shuffle(numbers)
        shuffled += numbers.tolist()
    return [samples[number] for number in shuffled]


def blend_sources(weights: list[float], num_samples: int) -> list[int]:
    """Return the source of each sample: the one whose number of samples is farthest below its part."""
    counts, sources = [0] * len(weights), []
    for sample in range(num_samples):
        chosen, largest = 0, -float("inf")
        for source, weight in enumerate(weights):
            error = weight * max(float(sample), 1.0) - float(counts[source])
            if error > largest:
                chosen, largest = source, error
        sources.append(chosen)
        counts[chosen] += 1
    return sources


def reference_blend(order: str, sources: list[list[list[int]]], weights: list[float] | None, seq_length: int, seed: int,
                    num_samples: int) -> list[list[int]]:
    """Return all samples of a blend of documents. Without weights: those of one epoch, or equal weights."""
    if order == "megatron" and weights is None:
        orders = [reference(order, documents, seq_length, seed, 1) for documents in sources]
        sizes = np.array([len(samples) for samples in orders], np.float64)
        normalized, total = (sizes / np.sum(sizes)).tolist(), min(num_samples, int(sizes.sum()))
    else:
        given = np.array(weights or [1.0] * len(sources))
        plain_sum = 0.0
        for weight in given.tolist():
            plain_sum += weight
        fractions = (given / (np.sum(given) if order == "megatron" else plain_sum)).tolist()
        sizes_of = {"megatron": lambda part: math.ceil(math.ceil(num_samples * part) * 1.005),
                    "neox": lambda part: math.ceil(num_samples * part * 1.005)}[order]
        orders = [reference(order, documents, seq_length, seed, sizes_of(part))
                  for documents, part in zip(sources, fractions, strict=True)]
        normalized = (np.array(fractions) / np.sum(np.array(fractions))).tolist()
        total = sum(math.ceil(num_samples * part) for part in fractions)
        if order == "neox":
            total = sum(len(samples) - 1 for samples in orders)
    counts, blend = [0] * len(sources), []
    for source in blend_sources(normalized, total):
        own = orders[source]
        blend.append(own[counts[source] if counts[source] < len(own) else counts[source] % (len(own) - 1)])
        counts[source] += 1
    return blend
