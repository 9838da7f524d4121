"""Batches: equal samples in every layout, weights that normalize the loss per token, and prefetching."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import Loader, MicroBatch, document_positions, evaluation_batches
from pretrain.data.samples.dataset import Indices
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter

EOD = 0


def dataset_of(tmp_path: Path, tokens: np.ndarray, seq_length: int = 4) -> ShuffledWindows:
    with IndexedWriter(tmp_path / "data", "int32") as writer:
        writer.add_document(tokens)
        writer.finalize()
    return ShuffledWindows(IndexedDataset(tmp_path / "data"), seq_length=seq_length, seed=5)


@pytest.fixture
def dataset(tmp_path: Path) -> ShuffledWindows:
    return dataset_of(tmp_path, np.arange(400))


def first_tokens(micro_batches: list[MicroBatch]) -> list[list[int]]:
    return [tokens_BT[:, 0].tolist() for tokens_BT, _ in micro_batches]


def test_micro_batches_have_tokens_labels_and_weights(dataset: ShuffledWindows) -> None:
    loader = Loader(dataset, micro_batch_size=2, gradient_accumulation_steps=3)
    micro_batches = loader.step(12)
    loader.close()
    assert len(micro_batches) == 3
    for number, (tokens_BT, (labels_BT, weights_BT)) in enumerate(micro_batches):
        for row in range(2):
            sample = dataset.samples([12 + number * 2 + row])[0].tolist()
            assert (tokens_BT[row].tolist(), labels_BT[row].tolist()) == (sample[:-1], sample[1:])
        assert tokens_BT.dtype == labels_BT.dtype == torch.int64
        assert tokens_BT.is_contiguous()
        assert labels_BT.is_contiguous()
        assert weights_BT.dtype == torch.float32
        assert torch.equal(weights_BT, torch.full((2, 4), 1 / 8))


@pytest.mark.parametrize(("dp", "mbs", "gas"), [(1, 4, 2), (2, 2, 2), (2, 1, 4), (4, 2, 1)])
def test_weights_give_the_mean_over_the_tokens_of_the_global_batch(
        tmp_path: Path, dp: int, mbs: int, gas: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 400)  # a third is EOD, so that micro-batches have different masks
    tokens[100:300] = EOD
    dataset = dataset_of(tmp_path, tokens)
    samples = np.stack([dataset.samples([40 + index])[0] for index in range(8)])
    masks = samples[:, :-1] != EOD
    assert 0 in masks.sum(axis=1), "the case needs a micro-batch without any unmasked token"
    loss_of_place = torch.linspace(1, 2, 8 * 4).reshape(8, 4)
    expected = float(loss_of_place[torch.from_numpy(masks)].mean())

    totals: list[int] = []
    barrier = threading.Barrier(dp, timeout=900)
    results: list[float] = [0.0] * dp

    def run(rank: int) -> None:
        def sum_over_data_parallel(count: int) -> torch.Tensor:
            assert threading.current_thread().name == f"rank{rank}", "collectives must run in the calling thread"
            totals.append(count)
            barrier.wait()
            return torch.tensor(sum(totals))

        loader = Loader(dataset, micro_batch_size=mbs, gradient_accumulation_steps=gas, data_parallel_rank=rank,
                        data_parallel_size=dp, eod_token=EOD, sum_over_data_parallel=sum_over_data_parallel)
        losses = []
        for number, (_, (_, weights_BT)) in enumerate(loader.step(40)):
            first = (number * dp + rank) * mbs
            losses.append(float((weights_BT * loss_of_place[first : first + mbs]).sum()))
        loader.close()
        results[rank] = sum(losses) / gas

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(dp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results) / dp == pytest.approx(expected, rel=1e-6)


def test_a_completely_masked_global_batch_has_weight_zero(tmp_path: Path) -> None:
    loader = Loader(dataset_of(tmp_path, np.zeros(100, int)), micro_batch_size=2, gradient_accumulation_steps=1,
                    eod_token=EOD)
    assert all(torch.equal(weights_BT, torch.zeros(2, 4)) for _, (_, weights_BT) in loader.step(0))
    loader.close()


def test_only_the_prediction_after_eod_is_masked(tmp_path: Path) -> None:
    """EOD itself is a label with a weight."""
    loader = Loader(dataset_of(tmp_path, np.array([7, EOD, 8, 9, 7]), 4), micro_batch_size=1,
                    gradient_accumulation_steps=1, eod_token=EOD)
    ((_, (labels_BT, weights_BT)),) = loader.step(0)
    loader.close()
    assert labels_BT.tolist() == [[EOD, 8, 9, 7]]
    assert weights_BT.tolist() == [[pytest.approx(1 / 3), 0.0, pytest.approx(1 / 3), pytest.approx(1 / 3)]]


def test_with_a_document_end_the_model_also_gets_positions(tmp_path: Path) -> None:
    data = dataset_of(tmp_path, np.array([7, EOD, 8, 9, 7] * 20), 9)
    loaders = [Loader(data, micro_batch_size=2, gradient_accumulation_steps=2, document_end=token)
               for token in (EOD, None)]
    with_positions, without = (loader.step(4) for loader in loaders)
    for ((tokens_BT, positions_BT), labels), (plain_BT, plain_labels) in zip(with_positions, without, strict=True):
        assert torch.equal(tokens_BT, plain_BT)
        assert all(torch.equal(*pair) for pair in zip(labels, plain_labels, strict=True))
        assert positions_BT.tolist() == document_positions(tokens_BT.numpy(), EOD).tolist()
        assert 0 < positions_BT.max() < 5
    for loader in loaders:
        loader.close()


class Recorder(ShuffledWindows):
    """A dataset that records the samples that are read, and fails at sample `fails_at`."""

    fails_at = -1

    def samples(self, indices: Indices) -> np.ndarray:
        self.read = [*getattr(self, "read", []), *indices]
        if self.fails_at in indices:
            raise OSError("the disk is gone")
        return super().samples(indices)


def recorder(dataset: ShuffledWindows, fails_at: int = -1) -> Recorder:
    data = Recorder(dataset.indexed, seq_length=dataset.seq_length, seed=dataset.seed)
    data.fails_at = fails_at
    return data


def test_reads_one_step_ahead_and_each_sample_once(dataset: ShuffledWindows) -> None:
    data, threads = recorder(dataset), threading.active_count()
    loader = Loader(data, micro_batch_size=2, gradient_accumulation_steps=1)
    for start in (0, 2, 4):
        loader.step(start)
    loader.close()
    loader.close()
    assert threading.active_count() == threads
    assert sorted(set(data.read)) == data.read == list(range(len(data.read)))
    assert len(data.read) in (6, 8)


def test_errors_of_the_reading_thread_are_raised_by_step(dataset: ShuffledWindows) -> None:
    loader = Loader(recorder(dataset, fails_at=3), micro_batch_size=2, gradient_accumulation_steps=1)
    loader.step(0)  # the reading thread prefetches samples 2 and 3, and fails
    with pytest.raises(OSError, match="the disk is gone"):
        loader.step(2)
    assert first_tokens(loader.step(4)) == [[int(dataset.samples([i])[0][0]) for i in (4, 5)]]
    loader.close()


def test_close_ends_the_thread_and_may_be_called_twice(dataset: ShuffledWindows) -> None:
    before = threading.active_count()
    loader = Loader(dataset, micro_batch_size=2, gradient_accumulation_steps=1)
    loader.step(0)
    loader.close()
    loader.close()
    assert threading.active_count() == before


def test_every_evaluation_reads_the_same_batches(dataset: ShuffledWindows) -> None:
    loader = Loader(dataset, micro_batch_size=2, gradient_accumulation_steps=2)
    runs = [[first_tokens(step) for step in evaluation_batches(loader, 3)] for _ in range(2)]
    loader.close()
    assert runs[0] == runs[1]
    starts = [[int(dataset.samples([i])[0][0]) for i in range(first, first + 2)] for first in range(0, 12, 2)]
    assert list(itertools.chain.from_iterable(runs[0])) == starts


def test_the_reading_thread_uses_the_device_of_its_rank(dataset: ShuffledWindows,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current CUDA device is device 0. The functions of CUDA are replaced: only the calls matter."""
    threads: dict[str, object] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: threads.update({threading.current_thread().name: device}))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: threads.setdefault(
        f"pinned by {threading.current_thread().name}", 0) or self)
    loader = Loader(dataset, micro_batch_size=1, gradient_accumulation_steps=1, pin_memory=True)
    loader.step(0)
    loader.close()
    assert threads == {"loader_0": 3, "pinned by loader_0": 0}


END_TOKEN = 0


@given(st.integers(1, 4).flatmap(lambda rows: st.integers(1, 12).flatmap(lambda length: st.lists(
    st.lists(st.integers(END_TOKEN, 2), min_size=length, max_size=length), min_size=rows, max_size=rows))))
def test_positions_begin_at_0_with_each_sample_and_after_each_eod(samples: list[list[int]]) -> None:
    expected = []
    for sample in samples:
        position, row = 0, []
        for token in sample:
            row.append(position)
            position = 0 if token == END_TOKEN else position + 1
        expected.append(row)
    positions_BT = document_positions(np.array(samples), END_TOKEN)
    assert positions_BT.dtype == np.int64
    assert positions_BT.tolist() == expected
