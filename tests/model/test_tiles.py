"""An MLP in tiles: gradients, the bytes that it keeps, and its peak of memory, compared with the MLP without tiles."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_memory import block_backward, block_saved
from pretrain.model.layer_specs import as_module
from pretrain.model.layers.block import Block
from pretrain.model.layers.rope import Rope
from pretrain.model.operator_memory import MicroBatch, recomputes_norms
from pretrain.model.recompute import Recompute
from tests.support.block_memory import measure_block
from tests.support.model_shapes import SHAPES

NAMES = ("gpt2", "llama", "gemma2", "gptj")  # norms before, after and shared; with and without a gate


def _config(name: str) -> ModelConfig:
    return model_config_from(SHAPES[name], "test")


def _gradients(config: ModelConfig, recompute: Recompute) -> tuple[float, list[torch.Tensor]]:
    module = as_module(config, recompute=recompute)
    initialize_parameters(module, config, seed=1)
    tokens = torch.randint(0, config.vocab_size, (2, 21), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    loss = module(tokens[:, :-1], tokens[:, 1:], torch.full((2, 20), 1 / 40))
    loss.backward()
    return loss.item(), [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["none", "blocks", "attention"])
@pytest.mark.parametrize("tiles", [3, 100])  # of 40 positions
def test_tiles_give_the_same_loss_and_gradients(name: str, part: str, tiles: int) -> None:
    config = replace(_config(name), residual_dropout=0.1)
    (loss, expected), (tiled_loss, found) = (_gradients(config, Recompute(part, mlp_tiles=n)) for n in (1, tiles))
    assert tiled_loss == pytest.approx(loss, rel=1e-6)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", SHAPES)
def test_recomputation_changes_no_bit_in_any_family(name: str) -> None:
    config = replace(_config(name), residual_dropout=0.1)
    loss, expected = _gradients(config, Recompute())
    for part in ("blocks", "attention", "mlp"):
        found_loss, found = _gradients(config, Recompute(part))
        assert found_loss == loss, part
        assert all(map(torch.equal, expected, found)), part


def test_one_hook_sees_the_gradient_of_all_tiles() -> None:
    module = as_module(_config("llama"), recompute=Recompute(mlp_tiles=4))
    initialize_parameters(module, _config("llama"), seed=1)
    seen: list[torch.Tensor] = []
    weight = module.get_submodule("1").mlp.up.weight
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    module(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8)).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def _measured(config: ModelConfig, tiles: int, batch: int, length: int) -> tuple[int, int, int, int]:
    """Return the kept bytes and the peak of the backward pass of a block, each measured and estimated, in fp32."""
    block = Block(config, config.blocks()[0], Rope(config) if config.position == "rope" else None, mlp_tiles=tiles)
    kept, peak = measure_block(block, torch.randn(batch, length, config.hidden_size, requires_grad=True))
    shape = config
    micro_batch = MicroBatch(batch * length, length, 4, cuda=False, mlp_tiles=tiles)
    saved = block_saved(shape, micro_batch, window=config.window(0))
    expected = saved + block_backward(shape, micro_batch, config.window(0)) + block.mlp.down.weight.nbytes
    return kept, saved, peak, expected


def _has_fused_grouped_attention() -> bool:
    q, k = torch.ones(1, 4, 8, 8), torch.ones(1, 2, 8, 8)
    return SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True)) != SDPBackend.MATH


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2", "gptj"])
def test_tiles_keep_less_and_lower_the_peak_as_estimated(name: str) -> None:
    """The inner size is eight times the hidden size, so that the MLP determines the peak without tiles."""
    config = replace(_config(name), intermediate_size=8 * _config(name).hidden_size)
    if config.num_kv_heads < config.num_heads and not _has_fused_grouped_attention():
        pytest.skip("this torch has no fused attention on CPUs for fewer key heads than query heads")
    kept, saved, peak, expected_peak = _measured(config, 1, 4, 512)
    tiled_kept, tiled_saved, tiled_peak, expected_tiled_peak = _measured(config, 8, 4, 512)
    inner = 4 * 512 * config.intermediate_size * 4 * (2 if config.gated_mlp else 1)
    assert kept == pytest.approx(saved, rel=0.01)
    assert tiled_kept == pytest.approx(tiled_saved, rel=0.01)
    # with tiles, the MLP's input is kept; without, it is recomputed if it is a norm in C
    again = recomputes_norms(config, MicroBatch(4 * 512, 512, 4, cuda=False))
    assert kept - tiled_kept == inner - again * 4 * 512 * config.hidden_size * 4
    assert tiled_peak < 0.75 * peak
    assert peak == pytest.approx(expected_peak, rel=0.08)
    assert tiled_peak == pytest.approx(expected_tiled_peak, rel=0.1)
