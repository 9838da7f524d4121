"""Curriculum of sequence lengths: parsing, and the division of samples."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.data.loader import Loader
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.token_schedules import SeqLengths, parse_seq_lengths
from pretrain.errors import ConfigError


def test_a_stage_begins_when_its_tokens_are_consumed() -> None:
    lengths = parse_seq_lengths("0:16,1e3:32,2048:64", seq_length=64)
    assert lengths == SeqLengths(64, ((0, 16), (16, 32), (32, 64)))
    assert [lengths.at(samples) for samples in (0, 15, 16, 31, 32, 10**12)] == [16, 16, 32, 32, 64, 64]
    assert parse_seq_lengths(None, seq_length=64).at(5) == 64


@pytest.mark.parametrize(("text", "message"), [
    ("", r"--seq_length_schedule: found ''"), ("16", "FROM_TOKENS:LENGTH"), ("0:16,", "found ''"),
    ("5:16", "rise from 0"), ("0:16,100:32,100:64", "rise from 0"), ("0:24", "length 24.* a divisor of --seq_len"),
    ("0:0", "length 0"), ("0:128", "length 128"), ("0:-16", "FROM_TOKENS"), ("0:16,1.5:32", "FROM_TOKENS"),
    ("0:16,nan:32", "FROM_TOKENS"), ("0:16,1e400:32", "FROM_TOKENS"), ("0:16:4", "FROM_TOKENS"),
])
def test_malformed_schedules_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_seq_lengths(text, seq_length=64)


@pytest.mark.parametrize("eod_token", [None, 3])
def test_samples_are_divided_and_no_token_is_lost(tmp_path: Path, eod_token: int | None) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document(np.random.default_rng(1).integers(0, 50, 900))
        writer.finalize()
    dataset = ShuffledWindows(IndexedDataset(tmp_path / "data"), seq_length=8, seed=5)
    lengths = SeqLengths(8, ((0, 2), (8, 4), (16, 8)))
    settings = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "eod_token": eod_token}
    divided = Loader(dataset, seq_length_at=lengths.at, **settings)
    whole = Loader(dataset, **settings)
    for consumed, length in ((0, 2), (4, 2), (8, 4), (12, 4), (16, 8), (4, 2)):
        for short, full in zip(divided.step(consumed), whole.step(consumed), strict=True):
            for part, sample in zip((short[0], *short[1]), (full[0], *full[1]), strict=True):
                assert part.shape == (2 * 8 // length, length)
                assert part.is_contiguous()
                assert torch.equal(part.flatten(), sample.flatten())
    divided.close()
    whole.close()
