"""--dataset_module: items in our order, weights, positions, and one line for each mistake of the user's code."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.data.data_spec import parse_data_spec
from pretrain.data.loader import Loader
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.samples.dataset import PADDING
from pretrain.data.samples.own import ItemError, OwnSamples
from pretrain.errors import ConfigError
from tests.support.launch import ROOT
from tests.support.own_data import build

SEQ_LENGTH, VOCAB_SIZE = 16, 256


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own folder with the dataset of the tests, as the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(ROOT / "tests" / "support" / "own_data.py", tmp_path / "own_data.py")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def opened(module: str = "own_data:build", needs_ends: tuple[str, ...] = (), **settings: Any) -> RunData:
    spec = parse_data_spec(None, dataset_module=module, dataset_args=json.dumps(settings))
    return open_run_data(spec, seq_length=SEQ_LENGTH, seed=7, tokenizer=None, vocab_size=VOCAB_SIZE,
                         needs_ends=needs_ends)


def own(data: RunData, name: str = "train") -> OwnSamples:
    dataset = data.datasets[name]
    assert isinstance(dataset, OwnSamples)
    return dataset


def test_each_epoch_has_all_items_in_another_order() -> None:
    data = opened(length=40)
    assert list(data.datasets) == ["train", "valid"]
    train, items = own(data), build("train", SEQ_LENGTH, length=40)
    assert items is not None
    expected = {}
    for number in range(40):
        tokens = items[number]["tokens"].tolist()
        expected[tuple(tokens + [PADDING] * (SEQ_LENGTH + 1 - len(tokens)))] = number
    orders = [[expected[tuple(sample)] for sample in train.samples(range(first, first + 40)).tolist()]
              for first in (0, 40, 80)]
    assert [sorted(order) for order in orders] == [list(range(40))] * 3
    assert len({tuple(order) for order in orders}) == 3
    tokens, weights, positions = train.columns([3, 45])
    assert [expected[tuple(sample)] for sample in tokens.tolist()] == [orders[0][3], orders[1][5]]
    assert weights is not None
    assert positions is None
    for row, number in enumerate((orders[0][3], orders[1][5])):
        found = weights[row, :len(items[number]["weights"])]
        np.testing.assert_array_equal(found, items[number]["weights"].astype(np.float32))
        assert not weights[row, len(found):].any()


@pytest.mark.parametrize("scale", [1, 1e-3])
def test_weights_give_the_weighted_mean_over_the_global_batch(scale: float) -> None:
    """Two data-parallel ranks: the factor of a loss is its weight / all weights, times what the engine divides by."""
    train, ranks, micro, steps = own(opened(scale=scale)), 2, 2, 3
    sums: list[float] = []
    loaders = [Loader(train, micro_batch_size=micro, gradient_accumulation_steps=steps, data_parallel_rank=rank,
                      data_parallel_size=ranks, sum_over_data_parallel=lambda total: torch.tensor(sum(sums[:2])))
               for rank in range(ranks)]
    _, weights, _ = train.columns(range(12, 24))
    assert weights is not None
    labels = train.samples(range(12, 24))[:, 1:]
    expected = np.where(labels == PADDING, 0, weights[:, 1:]).astype(np.float64)
    sums += [float(expected.sum()), 0.0]
    for rank, loader in enumerate(loaders):
        for number, (_, (labels_BT, weights_BT)) in enumerate(loader.step(12)):
            rows = slice((number * ranks + rank) * micro, (number * ranks + rank + 1) * micro)
            assert labels_BT.tolist() == np.where(labels[rows] == PADDING, 0, labels[rows]).tolist()
            np.testing.assert_allclose(weights_BT, expected[rows] / expected.sum() * ranks * steps, rtol=1e-6)
        loader.close()


def test_positions_are_those_of_the_items() -> None:
    data = opened(needs_ends=("--document_attention",), positions=True)
    loader = Loader(data.datasets["train"], micro_batch_size=3, gradient_accumulation_steps=1)
    [(inputs, _)] = loader.step(0)
    loader.close()
    assert isinstance(inputs, tuple)
    _, _, positions = own(data).columns(range(3))
    assert positions is not None
    assert inputs[1].tolist() == positions[:, :-1].tolist()
    assert (inputs[1] == 0).sum() > 3, "an item has two documents"
    with pytest.raises(ConfigError, match="have positions, which only --document_attention uses"):
        opened(positions=True)
    for flag in ("--document_attention", "--eod_mask_loss"):
        with pytest.raises(ConfigError, match=rf"{flag}: the end-of-document token of the train data is unknown"):
            opened(needs_ends=(flag,))


def test_the_fingerprint_is_that_of_the_user_with_our_settings() -> None:
    one, same, version, length = (own(opened(**settings)) for settings in
                                  ({}, {"scale": 2}, {"version": 2}, {"length": 41}))
    assert one.fingerprint == same.fingerprint, "the user's fingerprint() does not change with the scale"
    assert len({dataset.fingerprint for dataset in (one, version, length, own(opened(), "valid"))}) == 4
    assert one.record() == {"items": 40, "own_fingerprint": "train 1"}


FAULTS = {
    "raises": r"item 3 of the train data: __getitem__ failed: KeyError: 'text' \(.*own_data.py:\d+\)",
    "text": "its tokens are values of type <U5 and shape []; expected a sequence of integers",
    "floats": "its tokens are values of type float64 and shape", "matrix": "expected a sequence of integers",
    "one": "it has 1 tokens; expected 2 to 17, --seq_length + 1", "long": "it has 99 tokens",
    "large": "000; expected 0 to 255, the model's vocabulary", "negative": "it has the token -",
    "key": """it has the key 'weight'; expected tokens, weights, positions. Did you mean "weights"?""",
    "no tokens": "it has no tokens", "short weights": "as weights; expected one for each of its",
    "nan": "its weights are not finite numbers of at least 0", "below 0": "its weights are not finite numbers",
    "positions": "position 3 at place 0; expected 0, which begins a document, or the previous position + 1",
    "columns": "it has tokens, and item 0 has tokens and weights", "none": "it has no tokens",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_item_is_named_at_the_start_and_later(fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(broken=3, fault=fault)
    message = str(caught.value)
    assert message.startswith("--dataset_module own_data:build: item 3 of the train data: ")
    if fault == "raises":
        assert caught.value.details.startswith("Traceback (most recent call last):\n  File ")
        assert "samples/own.py" not in caught.value.details
        assert re.search(FAULTS[fault], message)
    else:
        assert FAULTS[fault] in message
        assert caught.value.details == ""
    later = own(opened(broken=20, fault=fault))
    with pytest.raises(ItemError, match="--dataset_module own_data:build: item 20 of the train data: "):
        later.samples(range(40))


MODULES = {
    "import missing_package": "no module named",
    "raise ValueError('no')": r"the import of wrong failed: ValueError: no \(.*wrong.py:1\)",
    "x = (": r"the import of wrong failed: SyntaxError: .*wrong.py:1", "import sys; sys.exit(3)": "SystemExit: 3",
    "": "wrong.py has no function build", "build = 3": "has no function build",
    "def biuld(): pass": r'has no function build. Did you mean "biuld"\?',
    "def build(): pass": r"build\('train', 16\) failed: TypeError: build\(\) takes 0 positional arguments",
    "def build(split, seq_length): pass": r"build\('train', 16\) returned None",
    "def build(split, seq_length): return [1]": "returned list without fingerprint. fingerprint",
    "def build(split, seq_length): return 3": "returned int without __len__ and __getitem__ and fingerprint",
    "class D(list):\n  def fingerprint(self): return ''\ndef build(*_): return D([[1, 2]])":
        r"found fingerprint\(\) = ''",
    "class D(list):\n  def fingerprint(self): return 'x'\ndef build(*_): return D()": r"found no items in build",
    "class D(list):\n  def fingerprint(self): return 1 / 0\ndef build(*_): return D()":
        "fingerprint.. of .* failed: Zero",
    "class D(list):\n  def fingerprint(self): return 'x'\n  def __len__(self): raise OSError('gone')\n"
    "def build(*_): return D()": "__len__ of .* failed: OSError: gone",
}


@pytest.mark.parametrize("text", MODULES)
def test_wrong_modules(folder: Path, text: str) -> None:
    (folder / "wrong.py").write_text(text)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=rf"(?i)^--dataset_module wrong:build: .*{MODULES[text]}"):
        opened("wrong:build")


def test_modules_are_found_as_python_finds_them(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "inner.py").write_text("from own_data import build")
    assert own(opened("package.inner:build")).samples_per_epoch == 40
    assert sys.path[-1] == str(folder), "the files of the current folder shadow no package"
    assert sys.path[0] != str(folder)
    for name in ("missing:build", "own_data.missing:build", "package.missing:build"):
        with pytest.raises(ConfigError, match=rf"{name}: .*no module"):
            opened(name)


@pytest.mark.parametrize(("flags", "problem"), [
    ({"dataset_module": "own_data"}, "expected MODULE:FUNCTION such as my_data:build"),
    ({"dataset_module": "own/data.py:build"}, "expected MODULE:FUNCTION"),
    ({"dataset_module": "a:b", "dataset_args": "[1]"}, "--dataset_args: found .*expected a JSON object"),
    ({"dataset_module": "a:b", "dataset_args": "{"}, "--dataset_args: found .*expected a JSON object"),
    ({"dataset_module": "a:b", "dataset_args": '{"split": 1}'}, "--dataset_args: found the argument split"),
    ({"dataset_args": "{}"}, "--dataset_args: it has no effect without --dataset_module"),
    *(({"dataset_module": "a:b", name: value}, f"--dataset_module / --{name}: found both") for name, value in (
        ("train_data", "c"), ("valid_data", ["c"]), ("split", "9,1,0"), ("sample_order", "neox"),
        ("packing", "best_fit"), ("blend_schedule", ["0:1,1"])))])
def test_wrong_flags(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_data_spec(**{"train_data": None, **flags})
