"""Linear layers in FP8: the bits of torchao's Float8Linear, no more memory than is predicted, and one graph."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pretrain.extensions.fp8.memory import Fp8Memory
from pretrain.extensions.fp8.products import Fp8Products
from pretrain.model.config import model_config_from
from pretrain.model.kernels.linear import linear
from pretrain.model.layer_memory import block_backward, block_saved
from pretrain.model.layers.block import Block
from pretrain.model.layers.linear import use_products
from pretrain.model.layers.rope import Rope
from pretrain.model.operator_memory import MicroBatch
from tests.extensions.fp8.installed import HAS_FP8
from tests.support.block_memory import measure_block
from tests.support.model_shapes import SHAPES
from tests.support.operators import by_torch

pytestmark = pytest.mark.skipif(not HAS_FP8, reason="this torch has no torchao that fits")
RECIPES = ("tensorwise", "rowwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_have_the_bits_of_torchao(recipe: str) -> None:
    products = Fp8Products(recipe, emulate=True)  # imports torchao without its warnings
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 96, dtype=torch.bfloat16)
    theirs = Float8Linear.from_float(layer, replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True))
    grad_BTO = torch.randn(2, 16, 96, dtype=torch.bfloat16)

    def results(function: Any) -> list[torch.Tensor]:
        layer.zero_grad()
        x_BTI = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        out_BTO = function(x_BTI)
        out_BTO.backward(grad_BTO)
        return [out_BTO, x_BTI.grad, layer.weight.grad, layer.bias.grad]

    found = results(lambda x_BTI: linear(x_BTI, layer.weight, layer.bias, products))
    assert all(torch.equal(a, b) for a, b in zip(found, results(theirs), strict=True))
    in_bf16 = results(layer)
    assert all(0 < (a - b).norm() < 0.1 * b.norm() for a, b in zip(found[:3], in_bf16, strict=False))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_block_saves_as_much_as_in_bf16_and_its_peak_is_predicted(name: str) -> None:
    config = replace(model_config_from(SHAPES[name], "test"), residual_dropout=0.0, attention_dropout=0.0)
    with by_torch():
        block = Block(config, config.blocks()[0], Rope(config) if config.position == "rope" else None).bfloat16()
        x_BTD = torch.randn(4, 64, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        in_bf16, _ = measure_block(block, x_BTD)
        use_products(block, Fp8Products("tensorwise", emulate=True))
        saved, peak = measure_block(block, x_BTD)
        batch = MicroBatch(4 * 64, 64, 2, cuda=False)
        predicted = block_saved(config, batch) + block_backward(config, batch) + Fp8Memory().work(config, batch)
    assert saved == in_bf16
    assert 0.8 * peak < predicted < 1.4 * peak
