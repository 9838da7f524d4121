"""Fixtures and hooks of all tests: a small corpus, the order of the test files, and the skipping of root tests."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data.token_files.writer import IndexedWriter

VOCAB_SIZE = 256
gc.disable()  # until the tests are collected: the objects of 300 modules and 10,000 tests are needed to the end

# A shell without job control starts commands in the background with the first two ignored, nohup any with the third;
# processes inherit it.
for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL),
                         (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest test files first, and skip the tests that need root for other users.

    `pytest -n N --dist loadfile` hands out the files in this order. Short files at the end keep all processes busy.
    """
    items.sort(key=_order)
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, which takes a third of the time of collecting them."""
    gc.freeze()
    gc.enable()


def _order(item: pytest.Item) -> int:
    longest = ("test_quickstart.py", "test_chaos.py", "test_reproduce.py", "test_wrong_inputs.py")
    if item.path.name in longest:
        return longest.index(item.path.name)
    return len(longest) + (item.path.relative_to(Path(__file__).parent).parts[0] not in ("distributed", "cluster"))


def selected_params(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the values of a parameter in the selected tests of this file, each once; of several names, tuples.

    A fixture launches only these cases. Slow cases are included only if `pytest -m slow` selects them. Give all the
    names of a test at once: the product of the values of each would include cases that no selected test reads.
    """
    found: list[Any] = []
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if item.path == request.path and callspec is not None and callspec.params.keys() >= set(names):
            values = tuple(callspec.params[name] for name in names)
            if (value := values if len(names) > 1 else values[0]) not in found:
                found.append(value)
    return found


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restore the environment variables after each test. A leftover RANK would turn the next test into a rank."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the small corpus, and return its prefix."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "small")


def write_corpus(prefix: Path) -> str:
    """Write a .bin/.idx pair and return its prefix: 300 documents of 20 to 399 tokens, vocabulary 256.

    Each token is 0 to 2 above the previous one (modulo 250), which a small model can learn. Token 0 ends a document.
    """
    numbers = np.random.default_rng(0)
    with IndexedWriter(Path(prefix), np.uint16) as writer:
        for _ in range(300):
            length = int(numbers.integers(20, 400))
            tokens = np.cumsum(numbers.integers(0, 3, length)) % (VOCAB_SIZE - 6) + 1
            tokens[-1] = 0
            writer.add_document(tokens.astype(np.uint16))
        writer.finalize({"vocab_size": VOCAB_SIZE, "eod_token": 0, "max_token": VOCAB_SIZE - 6})
    return str(prefix)
