"""Open the datasets of a run."""

from dataclasses import dataclass

from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.data_spec import DataSpec
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.samples.split import parse_split, split_documents
from pretrain.errors import ConfigError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class _Part:
    """The tokens [first_token, last_token) of a token file."""

    source: IndexedDataset
    first_token: int
    last_token: int

    @property
    def num_tokens(self) -> int:
        return self.last_token - self.first_token


def open_datasets(spec: DataSpec, *, seq_length: int, seed: int) -> dict[str, SampleDataset]:
    """Open the datasets of a run by name: "train", and validation and test data if there are documents for them.

    These are "valid" and "test", or "valid/NAME" and "test/NAME" for named sets. `split` divides the documents of each
    source of `train`. A split with its own pairs gets no documents of `train`. Raises ConfigError for a missing or
    damaged pair, and for a range of documents too short for one sample.
    """
    if not spec.train:
        raise ConfigError("--train_data", problem="it is required: the prefix of a .bin/.idx pair",
                          remedy="tools/prepare_data.py writes one")
    files = {prefix: IndexedDataset(prefix) for prefix in spec.prefixes}
    parts = _split_sources([files[prefix] for prefix in spec.train], spec)
    # By default 1 of 1000 documents is for the test set. In a small corpus this is too little for a test set.
    fewest_tokens = {"train": 0, "valid": 1, "test": seq_length + 1}
    datasets: dict[str, SampleDataset] = {}
    for split, own in (("train", ()), ("valid", spec.valid), ("test", spec.test)):
        for name, prefix in own:
            part = _Part(files[prefix], 0, files[prefix].num_tokens)
            datasets[name] = _windows(part, name, seq_length=seq_length, seed=seed)
        enough = [number for number, part in enumerate(parts[split]) if part.num_tokens >= fewest_tokens[split]]
        if not own and enough:
            datasets[split] = _blend(parts[split], enough, split, spec, seq_length=seq_length, seed=seed)
    return datasets


def _split_sources(sources: list[IndexedDataset], spec: DataSpec) -> dict[str, list[_Part]]:
    """Divide the documents of each source by --split. Returns the parts of all sources for train, valid and test."""
    own = {"valid": spec.valid, "test": spec.test}
    weights = [0.0 if own.get(name) else fraction for name, fraction in zip(SPLITS, parse_split(spec.split),
                                                                            strict=True)]
    train, valid, test = (weight / sum(weights) for weight in weights)
    parts: dict[str, list[_Part]] = {name: [] for name in SPLITS}
    for source in sources:
        ranges = split_documents(source.num_documents, (train, valid, test))
        for name, (first, last) in zip(SPLITS, ranges, strict=True):
            parts[name].append(_Part(source, source.document_offset(first), source.document_offset(last)))
    return parts


def _windows(part: _Part, name: str, *, seq_length: int, seed: int) -> SampleDataset:
    return ShuffledWindows(part.source, seq_length=seq_length, seed=seed, first_token=part.first_token,
                           last_token=part.last_token, name=name)


def _blend(parts: list[_Part], chosen: list[int], name: str, spec: DataSpec, *, seq_length: int,
           seed: int) -> SampleDataset:
    """Return the samples of one part, or the blend of several. `chosen`: the numbers of the parts with enough data.

    Without weights, the parts are read in proportion to their tokens. The schedule is for training only, so that all
    evaluations read the same samples.
    """
    datasets = [_windows(parts[number], name, seq_length=seq_length, seed=seed) for number in chosen]
    if len(datasets) == 1:
        return datasets[0]
    weights = [spec.weights[number] if spec.weights else parts[number].num_tokens for number in chosen]
    phases = [(-(-phase.from_tokens // seq_length), [phase.weights[number] for number in chosen])
              for phase in (spec.blend_schedule if name == "train" else ())]
    if phases and phases[0][0] == 0:
        weights = phases.pop(0)[1]
    return BlendedSamples(datasets, weights, schedule=phases, name=name)
