"""Open the datasets of a run."""

from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.samples.split import parse_split, split_documents
from pretrain.errors import ConfigError

_SPLITS = ("train", "valid", "test")


def open_datasets(train_data: str, *, valid_data: str | None = None, test_data: str | None = None, split: str,
                  seq_length: int, seed: int) -> dict[str, SampleDataset]:
    """Open the datasets of a run: "train", and "valid" and "test" if there are documents for them.

    `split` divides the documents of `train_data`. A dataset with its own pair gets no documents of `train_data`. Raises
    ConfigError for a missing or damaged pair, a bad --split, and a range of documents too short for one sample.
    """
    if not train_data:
        raise ConfigError("--train_data", problem="it is required: the prefix of a .bin/.idx pair",
                          remedy="tools/prepare_data.py writes one")
    own = {"valid": valid_data, "test": test_data}
    weights = [0.0 if own.get(name) else fraction for name, fraction in zip(_SPLITS, parse_split(split), strict=True)]
    train, valid, test = (weight / sum(weights) for weight in weights)
    indexed = IndexedDataset(train_data)
    ranges = split_documents(indexed.num_documents, (train, valid, test))
    # By default 1 of 1000 documents is for the test set. In a small corpus this is too little for a test set.
    fewest_tokens = {"train": 0, "valid": 1, "test": seq_length + 1}
    datasets: dict[str, SampleDataset] = {}
    for name, (first, last) in zip(_SPLITS, ranges, strict=True):
        prefix = own.get(name)
        source = IndexedDataset(prefix) if prefix else indexed
        start = 0 if prefix else indexed.document_offset(first)
        stop = source.num_tokens if prefix else indexed.document_offset(last)
        if prefix or stop - start >= fewest_tokens[name]:
            datasets[name] = ShuffledWindows(source, seq_length=seq_length, seed=seed, first_token=start,
                                           last_token=stop, name=name)
    return datasets
