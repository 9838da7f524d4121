"""Memory of transformers' layers: what fake tensors predict is what real ones need."""

from math import prod
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from pretrain.extensions.wrapped.decoder import decoder_of
from pretrain.extensions.wrapped.layer_memory import measured_bytes
from pretrain.extensions.wrapped.modules import DecoderLayer
from pretrain.extensions.wrapped.prove import tiny_config
from pretrain.extensions.wrapped.read import wrapped_config
from pretrain.extensions.wrapped.runner import width_at
from pretrain.model.operator_memory import MicroBatch
from tests.support.block_memory import measure_block

WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
SMALL = {**WIDTHS, "intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "granite": {**SMALL, "num_key_value_heads": 2},
    "opt": {**WIDTHS, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
    "cohere2": {**SMALL, "num_key_value_heads": 2, "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"]},
    "granitemoe": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    # layers with buffers
    "deepseek_v3": {**SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2,
                    "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
                    "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8, "vocab_size": 96,
                "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_fake_tensors_predict_the_memory_of_blocks(name: str, precision: str) -> None:
    config = wrapped_config(AutoConfig.for_model(name, **MODELS[name]).to_dict(), name)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    batch = MicroBatch(tokens=2 * 48, seq_length=48, element_bytes=dtype.itemsize, cuda=False)
    found = measured_bytes(config, decoder_of(config), batch)
    x_BTD = torch.randn(2, 48, 64, dtype=dtype, requires_grad=True)
    for index, layer in enumerate(config.blocks()):
        block = DecoderLayer(decoder_of(config), layer, index).to(dtype)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        saved, peak = measure_block(block, x_BTD)
        assert found.layers[layer].saved == saved
        assert found.layers[layer].saved + found.layers[layer].backward == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("name", ["gemma4_text", "deepseek_v4"])
def test_blocks_keep_what_they_carry(name: str) -> None:
    """The inputs and outputs of equal blocks differ in what is carried to later ones."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    config = tiny_config(AutoConfig.for_model(name))
    found = measured_bytes(config, decoder_of(config),
                           MicroBatch(tokens=2 * 48, seq_length=48, element_bytes=4, cuda=False))
    parts = decoder_of(config).parts
    widths = [prod(parts.hidden_shape) + width_at(parts.carried, index) for index in range(config.num_layers + 1)]
    inputs = [found.layers[layer].saved_input for layer in config.blocks()]
    assert inputs == [2 * 48 * width * 4 for width in widths[:-1]]
    assert len({*widths}) > 1
