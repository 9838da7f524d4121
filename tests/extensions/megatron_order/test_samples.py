"""The orders of Megatron-LM and GPT-NeoX, compared with their definition in plain loops."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.data_spec import parse_split
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from pretrain.extensions.megatron_order.order import MegatronOrder
from pretrain.extensions.megatron_order.samples import MegatronSamples
from tests.data.counting import write_counting
from tests.extensions.megatron_order.reference_order import reference


@settings(deadline=None, max_examples=80)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=150), st.integers(2, 40),
       st.integers(0, 2**32 - 1), st.floats(0.01, 4.5), st.sampled_from(["megatron", "neox"]), st.data())
def test_equals_the_definition(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int,
                               seed: int, epochs: float, order: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    indexed = write_counting(tmp_path_factory.mktemp("order") / "data", lengths)
    num_samples = max(int(epochs * sum(lengths[first:last]) / seq_length), 1)
    options = {"order": order, "seq_length": seq_length, "seed": seed, "num_samples": num_samples,
               "first_sequence": first, "last_sequence": last}
    if sum(lengths[first:last]) <= seq_length:
        with pytest.raises(ConfigError, match="for one sample of --seq_length"):
            MegatronSamples(indexed, **options)
        return
    documents = [list(range(sum(lengths[:number]), sum(lengths[:number + 1]))) for number in range(first, last)]
    expected = reference(order, documents, seq_length, seed, num_samples)
    dataset = MegatronSamples(indexed, **options)
    assert len(expected) >= num_samples
    assert dataset.samples(range(len(expected))).tolist() == expected
    some = np.random.default_rng(0).integers(0, len(expected), 5)
    assert dataset.samples(some).tolist() == [expected[number] for number in some]
    again = len(expected) % max(len(expected) - (order == "neox"), 1)  # GPT-NeoX counts one sample less
    assert dataset.samples([len(expected)]).tolist() == [expected[again]], "the order begins again"


def test_golden_samples(tmp_path: Path) -> None:
    """First tokens of the samples, as the index builders of Megatron-LM and GPT-NeoX gave them for this data."""
    indexed = write_counting(tmp_path / "data", [5, 0, 7, 1, 12, 3, 9])

    def first_tokens(order: str, num_samples: int) -> list[int]:
        data = MegatronSamples(indexed, order=order, seq_length=4, seed=1234, num_samples=num_samples)
        return data.samples(range(num_samples))[:, 0].tolist()

    assert [first_tokens(order, number) for order, number in GOLDEN] == list(GOLDEN.values())


GOLDEN = {  # (order, num_samples): 1 epoch; 2 with the last one apart; 2 together
    ("megatron", 9): [16, 0, 5, 4, 33, 29, 24, 20, 9],
    ("megatron", 12): [20, 33, 4, 9, 0, 24, 5, 29, 16, 11, 19, 0],
    ("megatron", 17): [35, 8, 20, 0, 0, 7, 16, 20, 16, 4, 32, 24, 4, 31, 11, 25, 24],
    ("neox", 12): [35, 8, 20, 0, 0, 7, 16, 20, 16, 4, 32, 24],
}


def test_sequences_count_and_not_documents(tmp_path: Path) -> None:
    """Both shuffle sequences, also if a document has several of them."""
    single = write_counting(tmp_path / "single", [10, 20, 30, 40])
    with IndexedWriter(tmp_path / "several", "int32") as writer:
        writer.add_tokens(np.arange(100))
        writer.add_sequences([10, 20, 30, 40])
        writer.end_documents([2, 4])
        writer.finalize()
    several = IndexedDataset(tmp_path / "several")
    assert (several.num_documents, several.num_sequences) == (2, 4)
    options = {"order": "megatron", "seq_length": 7, "seed": 5, "num_samples": 40}
    assert MegatronSamples(several, **options).samples(range(40)).tolist() == \
        MegatronSamples(single, **options).samples(range(40)).tolist()


def test_splits_of_megatron_core_round_each_bound() -> None:
    assert MegatronOrder().divide(1000, parse_split("969,30,1")) == [(0, 969), (969, 999), (999, 1000)]
    assert MegatronOrder().divide(10, parse_split("1,1,1")) == [(0, 3), (3, 7), (7, 10)]
    assert MegatronOrder().divide(7, parse_split("1")) == [(0, 7), (7, 7), (7, 7)]


def test_seeds_that_the_order_does_not_have_are_rejected(tmp_path: Path) -> None:
    indexed = write_counting(tmp_path / "data", [100])
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match=r"--seed: found .*; expected 0 to 4294967295 with --sample_order neox"):
            MegatronSamples(indexed, order="neox", seq_length=8, seed=seed, num_samples=1)


def test_the_fingerprint_depends_on_all_that_changes_the_order(tmp_path: Path) -> None:
    indexed = write_counting(tmp_path / "data", [100, 50])
    options = {"order": "neox", "seq_length": 8, "seed": 1, "num_samples": 10}
    changes: list[dict[str, object]] = [{}, {"order": "megatron"}, {"seq_length": 9}, {"num_samples": 11},
                                        {"last_sequence": 1}, {"first_sequence": 1}]
    fingerprints = [MegatronSamples(indexed, **{**options, **change}).fingerprint for change in changes]
    assert len(set(fingerprints)) == len(changes)
