"""A dataset as a source of preparations: see tests/data/prepare/test_combinations.py."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pretrain.extensions.hub_datasets.hub_dataset import DatasetName


def _dataset(corpus: Path, parquet: Path, folder: Path) -> AbstractContextManager[DatasetName]:
    return nullcontext(DatasetName(str(parquet.parent)))


SOURCES = {"dataset": _dataset}
