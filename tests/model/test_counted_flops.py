"""FLOPs of matrix products equal those that torch's own counter counts in a forward and backward pass.

torch's counter sees no attention kernel of a CPU. So the attention is made of plain products here (SDPBackend.MATH),
which compute all T * T scores; the causal half and the windows are the difference to `exact_flops_per_token`.
"""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.flops import exact_flops_per_token, mean_keys_seen
from pretrain.model.layer_specs import as_module, build_specs
from tests.support.model_shapes import SHAPES, write_config

BATCH, LENGTH = 2, 24


def inputs(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens_BT = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % config.vocab_size
    return tokens_BT, tokens_BT.clone(), torch.full((BATCH, LENGTH), 1 / (BATCH * LENGTH))


def counting() -> FlopCounterMode:
    """Return torch's counter. By itself it does not know the variant in place of `addmm`, which fused_loss.py uses."""
    def addmm_in_place(sum_shape: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
        return 2 * left[0] * left[1] * right[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_in_place})


def expected_flops(config: ModelConfig) -> float:
    """Return the FLOPs of a step with `exact_flops_per_token`, but with attention over all T keys.

    The counter also counts the weighted sum of a token's experts, and its gradient, as products.
    """
    seen = sum(mean_keys_seen(config.window(index), LENGTH) for index in range(config.num_layers))
    unseen = config.num_layers * LENGTH - seen
    per_token = exact_flops_per_token(config, LENGTH) + 12 * config.num_heads * config.head_size * unseen
    layers_with_experts = sum(map(config.has_experts, range(config.num_layers)))
    per_token += 4 * config.experts_per_token * config.hidden_size * layers_with_experts
    return per_token * BATCH * LENGTH


@pytest.mark.parametrize("name", SHAPES)
def test_counted_flops_are_equal(name: str, tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, SHAPES[name]))
    module = as_module(config, plain_operators=True)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    with sdpa_kernel(SDPBackend.MATH), counting() as counter:
        module(*inputs(config)).backward()
    assert counter.get_total_flops() == pytest.approx(expected_flops(config), rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # tied and untied
def test_the_stages_of_a_pipeline_have_these_flops_together(name: str, tmp_path: Path) -> None:
    config = load_model_config(write_config(tmp_path, SHAPES[name]))
    tied = as_module(config, plain_operators=True)
    for parameter in tied.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens_BT, labels_BT, weights_BT = inputs(config)
    middle, total = len(build_specs(config)) // 2, 0
    with sdpa_kernel(SDPBackend.MATH), counting() as counter:
        sent_BTD = tokens_BT
        for layer in tied.layers[:middle]:
            sent_BTD = layer(sent_BTD)
    total += counter.get_total_flops()
    with sdpa_kernel(SDPBackend.MATH), counting() as counter:
        received_BTD = x_BTD = sent_BTD.detach().requires_grad_()
        for layer in tied.layers[middle:-1]:
            x_BTD = layer(x_BTD)
        tied.layers[-1](x_BTD, (labels_BT, weights_BT)).backward()
    total += counter.get_total_flops()
    with counting() as counter:
        sent_BTD.backward(received_BTD.grad)
    assert total + counter.get_total_flops() == pytest.approx(expected_flops(config), rel=1e-12)


@pytest.mark.parametrize("window", [0, 1, 5, 23, 24, 40])
def test_keys_that_queries_see(window: int) -> None:
    """With a mask of every pair of positions."""
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < (window or LENGTH))
    assert mean_keys_seen(window, LENGTH) == pytest.approx(float(mask.sum()) / LENGTH, rel=1e-12)
