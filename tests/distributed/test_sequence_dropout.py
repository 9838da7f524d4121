"""Dropout under sequence parallelism: the ranks of a sequence drop different elements, at the rate of one rank."""

from pathlib import Path

import pytest
import torch

from tests.support.cases import case, config, flags
from tests.support.launch import run_worker

RATE, HEADS, LENGTH = 0.2, 4, 16


def test_ranks_drop_different_elements_at_the_same_rate(corpus: str, tmp_path: Path) -> None:
    """The heads have LENGTH elements, so that the attention's output can show its probabilities."""
    run = flags(corpus, layers=2, hidden=HEADS * LENGTH, steps=1,
                overrides=f"n_head={HEADS},resid_pdrop={RATE},attn_pdrop={RATE},embd_pdrop={RATE}")
    values = {**config(1, micro=4, accumulation=1), "sequence_parallel_size": 2}
    (ranks,) = run_worker("dropout_worker.py", [case("masks", "masks", values, {**run, "seq_length": LENGTH})], 2,
                          tmp_path).values()
    hidden = torch.tensor([rank["hidden"] for rank in ranks]).bool()  # [rank, layer, B, t, D]
    attention = torch.tensor([rank["attention"] for rank in ranks]).bool()  # [rank, layer, B, H / 2, T, T]
    assert hidden.shape == (2, 5, 4, LENGTH // 2, HEADS * LENGTH)
    assert attention.shape == (2, 2, 4, HEADS // 2, LENGTH, LENGTH)

    visible = LENGTH * (LENGTH + 1) // 2
    assert hidden.float().mean().item() == pytest.approx(RATE, abs=0.02)
    assert attention.sum().item() / (attention.numel() / LENGTH**2 * visible) == pytest.approx(RATE, abs=0.03)
    both = (hidden[0] & hidden[1]).float().mean().item()  # dropped at the same place of both shards
    assert both == pytest.approx(RATE**2, abs=0.01), "independent"
    of_heads = attention.movedim(3, 1).reshape(HEADS, -1)  # the heads of both ranks
    assert len({tuple(mask.tolist()) for mask in of_heads}) == HEADS
    assert len({tuple(mask.flatten().tolist()) for rank in hidden for mask in rank}) == 2 * 5
