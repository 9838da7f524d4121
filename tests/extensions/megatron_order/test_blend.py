"""Blends in the orders of Megatron-LM and GPT-NeoX, compared with their definition in plain loops."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrain.data.data_spec import parse_data_spec
from pretrain.data.open_datasets import open_datasets
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.dataset import SampleDataset
from pretrain.errors import ConfigError
from pretrain.extensions.megatron_order import blend
from pretrain.extensions.megatron_order.blend import GreedyQuotas
from pretrain.extensions.megatron_order.order import MegatronOrder
from tests.data.counting import write_counting
from tests.extensions.megatron_order.reference_order import blend_sources, reference_blend

WEIGHTS = st.one_of(st.floats(1e-9, 1e9), st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 7.0]))
ORDERS = ("megatron", "neox")


@settings(deadline=None, max_examples=30)
@given(st.one_of(st.lists(WEIGHTS, min_size=2, max_size=40), st.integers(2, 40).map(lambda n: [1.0] * n),
                 st.integers(2, 40).map(lambda n: [0.5**i for i in range(n)])), st.integers(1, 6000), st.data())
def test_equals_the_loop_over_all_samples(weights: list[float], num_samples: int, data: st.DataObject) -> None:
    """Also where roundings and ties decide, and across the blocks that are computed at the same time."""
    normalized = (np.array(weights) / np.sum(np.array(weights))).tolist()
    expected = blend_sources(normalized, num_samples)
    quotas = GreedyQuotas(weights, num_samples)
    found, counters = quotas.locate(np.arange(num_samples))
    assert found.tolist() == expected
    counts = [0] * len(weights)
    for source, counter in zip(expected, counters.tolist(), strict=True):
        assert counter == counts[source]
        counts[source] += 1
    assert quotas.counts(num_samples) == counts
    first = data.draw(st.integers(0, num_samples))
    assert quotas.counts(first) == [expected[:first].count(source) for source in range(len(weights))]
    assert quotas.counts(2 * num_samples + first) == \
        [2 * total + part for total, part in zip(counts, quotas.counts(first), strict=True)]


def test_a_blend_that_forgets_its_beginning_slowly_equals_the_loop() -> None:
    """Numbers of samples that begin at an estimate take a thousand steps here until they are those of the loop."""
    weights = [0.5**number for number in range(21)]
    normalized = (np.array(weights) / np.sum(np.array(weights))).tolist()
    assert GreedyQuotas(weights, 30_000).locate(np.arange(30_000))[0].tolist() == blend_sources(normalized, 30_000)


def documents_of(lengths: list[int], first: int) -> list[list[int]]:
    bounds = list(itertools.accumulate(lengths, initial=first))
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(1, 60), min_size=8, max_size=40), min_size=2, max_size=6), st.integers(2, 20),
       st.integers(0, 2**32 - 1), st.floats(0.05, 4), st.sampled_from(ORDERS), st.data())
def test_samples_of_a_blend_equal_the_definition(tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]],
                                                 seq_length: int, seed: int, epochs: float, order: str,
                                                 data: st.DataObject) -> None:
    """Several epochs, with and without weights; with Megatron-LM's order, --split divides each source."""
    folder = tmp_path_factory.mktemp("blend")
    weights = data.draw(st.one_of(st.none(), st.lists(st.floats(0.01, 100), min_size=len(lengths),
                                                      max_size=len(lengths))))
    split = "3,1,0" if order == "megatron" else "1,0,0"
    divided = [MegatronOrder().divide(len(part), (0.75, 0.25, 0.0)) if order == "megatron" else
               [(0, len(part)), (0, 0)] for part in lengths]
    assume(all(sum(part[first:last]) > seq_length for part, bounds in zip(lengths, divided, strict=True)
               for first, last in bounds if last))
    prefixes = []
    for number, part in enumerate(lengths):
        write_counting(folder / f"{number}", part, first=10**6 * number)
        prefixes.append(str(folder / f"{number}"))
    words = [word for weight, prefix in zip(weights, prefixes, strict=True) for word in (repr(weight), prefix)] \
        if weights else prefixes
    num_samples = {"train": max(int(epochs * sum(map(sum, lengths)) / seq_length), 1), "valid": 7}
    spec = parse_data_spec(words, split=split, sample_order=order)
    found = open_datasets(spec, seq_length=seq_length, seed=seed, num_samples=num_samples)
    for name, bounds in zip(("train", "valid") if order == "megatron" else ("train",), zip(*divided, strict=True),
                            strict=False):
        documents = [documents_of(part, 10**6 * number)[first:last]
                     for number, (part, (first, last)) in enumerate(zip(lengths, bounds, strict=True))]
        expected = reference_blend(order, documents, weights, seq_length, seed, num_samples[name])
        blend = found[name]
        assert isinstance(blend, BlendedSamples)
        assert blend.order_length == len(expected)
        assert blend.samples(range(len(expected) + 2)).tolist() == (expected + 2 * expected)[:len(expected) + 2]
        some = np.random.default_rng(0).integers(0, len(expected), 9)
        assert blend.samples(some).tolist() == [expected[number] for number in some]


GOLDEN = {  # (order, weights, num_samples): first tokens of the samples
    ("megatron", None, 14): [228, 120, 27, 260, 100, 36, 224, 207, 112, 12, 203, 136, 236, 3],
    ("megatron", (0.5, 0.2, 0.3), 24): [16, 228, 120, 32, 260, 3, 100, 8, 224, 36, 20, 207, 112, 12, 203, 28, 136, 27,
                                        236, 34, 20, 232, 108, 3],
    ("megatron", (1, 1, 1), 20): [27, 120, 228, 36, 100, 260, 12, 112, 224, 3, 136, 207, 32, 108, 203, 28, 124, 236, 20,
                                  128],
    ("neox", None, 14): [27, 120, 228, 36, 100, 260, 12, 112, 224, 3, 136, 207, 32, 108, 203, 28],
    ("neox", (0.5, 0.2, 0.3), 24): [27, 228, 120, 9, 260, 3, 100, 36, 224, 32, 23, 207, 112, 4, 203, 0],
}


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Three sources of the documents for which GOLDEN was made."""
    for number, lengths in enumerate([[5, 7, 1, 12, 3, 9], [20, 4, 4, 15], [8, 8, 30, 2, 2, 11]]):
        write_counting(tmp_path / f"s{number}", lengths, first=100 * number)
    return [str(tmp_path / f"s{number}") for number in range(3)]


def blend_of(prefixes: list[str], order: str = "megatron", weights: tuple[float, ...] | None = None,
             num_samples: int = 14, **changes: int) -> SampleDataset:
    words = prefixes if weights is None else [word for weight, prefix in zip(weights, prefixes, strict=True)
                                              for word in (str(weight), prefix)]
    return open_datasets(parse_data_spec(words, split="1", sample_order=order),
                         **{"seq_length": 4, "seed": 1234, **changes}, num_samples={"train": num_samples})["train"]


def test_golden_samples(prefixes: list[str]) -> None:
    """First tokens of the samples, as Megatron-LM (commit d98e8a64, 2026-08) and GPT-NeoX (ea7aefd8) gave them."""
    for (order, weights, num_samples), expected in GOLDEN.items():
        samples = blend_of(prefixes, order, weights, num_samples).samples(range(len(expected)))
        assert samples[:, 0].tolist() == expected, (order, weights)


def test_the_record_and_the_fingerprint_depend_on_all_that_changes_the_order(prefixes: list[str]) -> None:
    blend = blend_of(prefixes, weights=(0.5, 0.2, 0.3), num_samples=24)
    record = blend.record()
    assert record["order_samples"] == 24
    assert [(Path(source["prefix"]).name, source["sample_order"], source["order_samples"])
            for source in record["sources"]] == [("s0", "megatron", 13), ("s1", "megatron", 6), ("s2", "megatron", 9)]
    others = [blend, blend_of(prefixes, "neox", (0.5, 0.2, 0.3), 24), blend_of(prefixes, weights=None, num_samples=24),
              blend_of(prefixes, weights=(0.5, 0.2, 0.3), num_samples=30),
              blend_of(prefixes, weights=(0.5, 0.3, 0.2), num_samples=24),
              blend_of(prefixes[::-1], weights=(0.3, 0.2, 0.5), num_samples=24)]
    assert len({other.fingerprint for other in others}) == len(others)
    assert blend_of(prefixes, weights=(50, 20, 30), num_samples=24).fingerprint == blend.fingerprint
    assert isinstance(blend, BlendedSamples)
    assert blend.counts_between(3, 10) == [count - first for count, first in
                                           zip(blend.counts(10), blend.counts(3), strict=True)]
    assert sum(blend.counts_between(3, 10)) == 7


def test_a_source_that_the_blend_of_megatron_exhausts_is_rejected(prefixes: list[str],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend, "samples_of_sources", lambda order, weights, total: [1, 1, 1])
    with pytest.raises(ConfigError, match=r"the blend takes 13 train samples of .*s0, whose order has 9: Megatron-LM "
                                          r"rejects it, too"):
        blend_of(prefixes, weights=(1, 1, 1), num_samples=39)
