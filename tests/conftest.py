"""What several tests share: a small corpus; and the order of the files."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.indexed import IndexedWriter

VOCAB_SIZE = 256


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that `pytest -n N --dist loadfile` does not end with one process at work on it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Undo what the test's code exported, such as RANK: the next test in this process would be a rank."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a .bin/.idx pair: 300 documents of 20 to 400 tokens below 256, each token a little above the last one,
    end of document 0."""
    prefix = tmp_path_factory.mktemp("corpus") / "small"
    numbers = np.random.default_rng(0)
    with IndexedWriter(Path(prefix), np.uint16) as writer:
        for _ in range(300):
            length = int(numbers.integers(20, 400))
            tokens = np.cumsum(numbers.integers(0, 3, length)) % (VOCAB_SIZE - 6) + 1
            tokens[-1] = 0
            writer.add_document(tokens.astype(np.uint16))
        writer.finalize({"vocab_size": VOCAB_SIZE, "eod_token": 0, "max_token": VOCAB_SIZE - 6})
    return str(prefix)
