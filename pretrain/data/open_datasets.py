"""Open the datasets of a run."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pretrain.daemon_threads import map_in_threads
from pretrain.data.data_spec import DataSpec, parse_split, split_documents
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.dataset import SampleDataset, SequenceRange
from pretrain.data.samples.packed import PackedDocuments
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.token_file import allow_open_files
from pretrain.errors import ConfigError
from pretrain.remote import is_url

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class _Part:
    """The tokens [first_token, last_token) of a token file. With another order than the default: its sequences."""

    source: IndexedDataset
    first_token: int
    last_token: int
    sequences: tuple[int, int] = (0, 0)

    @property
    def sequence_range(self) -> SequenceRange:
        return self.source, *self.sequences

    @property
    def num_tokens(self) -> int:
        return self.last_token - self.first_token


def open_datasets(spec: DataSpec, *, seq_length: int, seed: int,
                  num_samples: Mapping[str, int] | None = None) -> dict[str, SampleDataset]:
    """Open the datasets of a run by name: "train", and validation and test data if there are documents for them.

    These are "valid" and "test", or "valid/NAME" and "test/NAME" for named sets. `split` divides the documents of each
    source of `train`. A split with its own pairs gets no documents of `train`. Raises ConfigError for a missing or
    damaged pair, and for a range of documents too short for one sample.

    `num_samples`: number that the run reads of each split; the orders of extensions depend on it.
    """
    if not spec.train:
        raise ConfigError("--train_data", problem="it is required: the prefix of a .bin/.idx pair",
                          remedy="`ds-pretrain prepare` writes one")
    def planned(name: str) -> int:
        return (num_samples or {}).get(name.partition("/")[0], 1)

    def samples_of(part: _Part, name: str, part_seed: int = seed) -> SampleDataset:
        return _samples(part, name, spec, seq_length=seq_length, seed=part_seed, num_samples=planned(name))

    allow_open_files(2 * len(spec.prefixes))
    files = _open_files(spec)
    parts = _split_sources([files[prefix] for prefix in spec.train], spec)
    # By default 1 of 1000 documents is for the test set. In a small corpus this is too little for a test set. A small
    # source of a blend may also have too little for the validation set.
    fewest_tokens = {"train": 0, "valid": 1 if len(spec.train) == 1 else seq_length + 1, "test": seq_length + 1}
    datasets: dict[str, SampleDataset] = {}
    for split, own in (("train", ()), ("valid", spec.valid), ("test", spec.test)):
        for name, prefix in own:
            source = files[prefix]
            datasets[name] = samples_of(_Part(source, 0, source.num_tokens, (0, source.num_sequences)), name)
        enough = [number for number, part in enumerate(parts[split]) if part.num_tokens >= fewest_tokens[split]]
        if not own and len(enough) > 1 and (order := spec.order) is not None:
            datasets[split] = order.blend([parts[split][number].sequence_range for number in enough],
                                          [spec.weights[number] for number in enough] if spec.weights else None,
                                          seq_length=seq_length, seed=seed, num_samples=planned(split), name=split)
        elif not own and enough:
            datasets[split] = _blend(parts[split], enough, split, spec, samples_of, seq_length=seq_length, seed=seed)
    return datasets


def _open_files(spec: DataSpec) -> dict[str, IndexedDataset]:
    """Open all token files; those at URLs at the same time, because each waits for several answers."""
    urls = [prefix for prefix in spec.prefixes if is_url(prefix)]
    opened = dict(zip(urls, map_in_threads(lambda url: IndexedDataset(url, spec.settings), urls), strict=True))
    return {prefix: opened[prefix] if prefix in opened else IndexedDataset(prefix) for prefix in spec.prefixes}


def _split_sources(sources: list[IndexedDataset], spec: DataSpec) -> dict[str, list[_Part]]:
    """Divide the documents of each source by --split. Returns the parts of all sources for train, valid and test."""
    own = {"valid": spec.valid, "test": spec.test}
    weights = [0.0 if own.get(name) else fraction for name, fraction in zip(SPLITS, parse_split(spec.split),
                                                                            strict=True)]
    train, valid, test = (weight / sum(weights) for weight in weights)
    parts: dict[str, list[_Part]] = {name: [] for name in SPLITS}
    order = spec.order
    for source in sources:
        ranges = split_documents(source.num_documents, (train, valid, test)) if order is None else \
            order.divide(source.num_sequences, (train, valid, test))
        for name, (first, last) in zip(SPLITS, ranges, strict=True):
            if order is None:
                start, stop = source.document_offset(first), source.document_offset(last)
            else:
                start, stop = (int(source.sequence_offsets(number, number)[0]) for number in (first, last))
            parts[name].append(_Part(source, start, stop, (first, last)))
    return parts


def _samples(part: _Part, name: str, spec: DataSpec, *, seq_length: int, seed: int, num_samples: int) -> SampleDataset:
    """Return the samples of a part in the order of --sample_order."""
    if (order := spec.order) is None:
        kind = PackedDocuments if spec.packing == "best_fit" else ShuffledWindows
        return kind(part.source, seq_length=seq_length, seed=seed, first_token=part.first_token,
                    last_token=part.last_token, name=name)
    return order.samples(part.sequence_range, seq_length=seq_length, seed=seed, num_samples=num_samples, name=name)


def _blend(parts: list[_Part], chosen: list[int], name: str, spec: DataSpec,
           samples_of: Callable[[_Part, str, int], SampleDataset], *, seq_length: int, seed: int) -> SampleDataset:
    """Return the samples of one part, or the blend of several. `chosen`: the numbers of the parts with enough data.

    Without weights, the parts are read in proportion to their tokens. The schedule is for training only, so that all
    evaluations read the same samples.
    """
    if len(chosen) == 1:
        return samples_of(parts[chosen[0]], name, seed)
    # Other seeds, because sources of equal size would have equal orders: parallel texts would be read side by side.
    datasets = [samples_of(parts[number], name, seed + (number << 32)) for number in chosen]
    weights = [spec.weights[number] if spec.weights else parts[number].num_tokens for number in chosen]
    phases = [(-(-phase.from_tokens // seq_length), [phase.weights[number] for number in chosen])
              for phase in (spec.blend_schedule if name == "train" else ())]
    for (before, _), (after, _) in itertools.pairwise(phases):
        if before == after:
            raise ConfigError("--blend_schedule", problem=f"two phases begin at sample {after:,}",
                              remedy=f"let each of them have at least one sample of {seq_length} tokens")
    if phases and phases[0][0] == 0:
        weights = phases.pop(0)[1]
    return BlendedSamples(datasets, weights, schedule=phases, name=name)
