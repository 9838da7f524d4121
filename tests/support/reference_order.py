"""The sample orders of Megatron-LM and GPT-NeoX by their definition, in plain loops."""

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
