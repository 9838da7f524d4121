"""Samples in these orders for tests/data/test_ledger.py."""

from hypothesis import strategies as st

from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.extensions.megatron_order.samples import MegatronSamples


def ordered_samples(indexed: IndexedDataset, seq_length: int, seed: int, data: st.DataObject) -> MegatronSamples:
    order = data.draw(st.sampled_from(["megatron", "neox"]))
    return MegatronSamples(indexed, order=order, seq_length=seq_length, seed=seed,
                           num_samples=data.draw(st.integers(1, 100)))
