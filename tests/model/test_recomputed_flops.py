"""FLOPs of recomputation."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pretrain.model.config import load_model_config, model_config_from
from pretrain.model.layers.block import Block
from pretrain.model.layers.rope import Rope
from pretrain.model.recompute import Recompute
from pretrain.model.recomputed_flops import recomputed_fraction
from tests.support.model_shapes import SHAPES


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "olmo2", "gemma_multi_query"])
@pytest.mark.parametrize("part", ["attention", "mlp", "blocks"])
def test_recomputed_flops_equal_those_that_torch_counts(name: str, part: str) -> None:
    """Without torch's attention operators, whose recomputation cannot be separated from the first computation."""
    config = replace(model_config_from(SHAPES[name], "test"), hidden_size=64, head_size=16, intermediate_size=160,
                     max_positions=2048)
    batch, length = 1, 8
    counted = {}
    for recomputed in ("none", part):
        rope = Rope(config) if config.position == "rope" else None
        block = Block(config, config.blocks()[0], rope, recompute=recomputed)
        x_BTD = torch.randn(batch, length, config.hidden_size, requires_grad=True)
        block(x_BTD.detach())  # compares the C functions with torch's operators before the measurement
        with FlopCounterMode(display=False) as counter:
            if recomputed == "blocks":
                y_BTD = torch.utils.checkpoint.checkpoint(block, x_BTD, use_reentrant=False)
            else:
                y_BTD = block(x_BTD)
            y_BTD.sum().backward()
        counted[recomputed] = counter.get_total_flops()
    forward = counted["none"] / 3
    assert (counted[part] - counted["none"]) / forward == pytest.approx(
        recomputed_fraction(config, Recompute(part), length), rel=0.12)


def test_every_second_block_is_half_of_the_work() -> None:
    model = load_model_config("gpt2")
    assert recomputed_fraction(model, Recompute(), 1024) == 0.0
    assert recomputed_fraction(model, Recompute("blocks", 2), 1024) == pytest.approx(0.5)
    assert recomputed_fraction(model, Recompute(interval=3), 1024) == 1.0
    parts = [recomputed_fraction(model, Recompute(part), 1024) for part in ("attention", "mlp", "blocks")]
    assert parts == sorted(parts)
    assert parts[2] == 1.0
