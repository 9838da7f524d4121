"""Shapes of models: parameter counts equal the presets' counts and, for other architectures, transformers' counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import read_shape, shape_of
from pretrain.memory.estimate.other_architectures import ARCHITECTURES
from pretrain.model.config import load_model_config, model_config_from, preset_names
from tests.support.model_shapes import SHAPES, write_config

SMALL = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96}
NO_HEAD_DIM = {"head_dim": None}  # removes the key, because Falcon computes head_dim from the other sizes
# model_type -> changes to SMALL, one model each
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "opt": [{"ffn_dim": 96, "word_embed_proj_dim": 64, "hidden_size": 64}],
    "gpt_bigcode": [{"n_embd": 64, "n_layer": 2, "n_head": 4}, {"n_embd": 64, "n_head": 4, "multi_query": False}],
    "falcon": [{**NO_HEAD_DIM, **changes} for changes in (
        {}, {"new_decoder_architecture": True, "num_kv_heads": 2}, {"bias": True, "parallel_attn": False},
        {"alibi": True, "multi_query": False})],
    "phi3": [{"head_dim": 16, "pad_token_id": 0}], "olmo": [{"head_dim": 16}],
    "cohere": [{"head_dim": 16, "pad_token_id": 0}], "smollm3": [{"head_dim": 16, "pad_token_id": 0}],
    "granite": [{"head_dim": 16, "attention_bias": True}],
}


def test_shapes_have_the_parameters_of_their_models() -> None:
    configs = [load_model_config(name) for name in preset_names()]
    configs += [model_config_from(values, "test") for values in SHAPES.values()]
    for config in configs:
        assert shape_of(config).num_parameters() == config.num_parameters()
        assert shape_of(config).active_parameters() == config.num_parameters(active=True)
    assert all(read_shape(name) == shape_of(load_model_config(name)) for name in preset_names())


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_other_architectures_have_as_many_parameters_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for changes in VARIANTS.get(model_type, [{}]):
        values = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
        config = AutoConfig.for_model(model_type, **values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shape = read_shape(write_config(tmp_path, json.loads(config.to_json_string())))
        assert shape.num_parameters() == sum(weight.numel() for weight in model.parameters()), changes
        assert "model_type" in shape.untrainable_reason


def test_an_untrainable_key_does_not_change_the_shape(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, {**SHAPES["llama"], "sliding_window": 128}))
    assert "sliding_window" in shape.untrainable_reason
    assert replace(shape, untrainable_reason="") == shape_of(model_config_from(SHAPES["llama"], "test"))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_tensors_of_their_models(name: str) -> None:
    config = model_config_from(SHAPES[name], "test")
    shape = shape_of(config)
    layers = shape.layers()[:-1] if config.tie_word_embeddings else shape.layers()
    found = [(tensor.name, tensor.shape) for layer in layers for tensor in layer.tensors]
    expected = [(rule.ours.removeprefix("tied_modules."), rule.shape) for rule in config.tensors()]
    assert found == [(ours.split(".", 1)[1], size) for ours, size in expected]
    assert [layer.window for layer in layers if layer.kind == "block"] == \
        [config.window(index) for index in range(config.num_layers)]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_an_unknown_activation_does_not_prevent_an_estimate(name: str, tmp_path: Path) -> None:
    keys = {"gpt2": "activation_function", "llama": "hidden_act", "gemma2": "hidden_activation"}
    values = {key: value for key, value in SHAPES[name].items() if key != "hidden_act"}
    shape = read_shape(write_config(tmp_path, {**values, keys[name]: "mish"}))
    assert f"{keys[name]}: found 'mish'" in shape.untrainable_reason
    assert replace(shape, untrainable_reason="") == shape_of(model_config_from(SHAPES[name], "test"))
    other = read_shape(write_config(tmp_path, {"model_type": "granite", **SMALL, "hidden_act": "mish"}))
    assert other.untrainable_reason.endswith("model_type 'granite' can be estimated, but not trained")


def test_active_parameters_exclude_idle_experts(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 1024,
                                               "num_hidden_layers": 4, "num_attention_heads": 16,
                                               "intermediate_size": 3584}))
    expert_parameters = 4 * 8 * 3 * 1024 * 3584  # layers, experts, matrices
    assert shape.active_parameters() == shape.num_parameters() - expert_parameters * 6 // 8


def test_unknown_models_are_rejected(tmp_path: Path) -> None:
    for values in ({"model_type": "t5"}, {"model_type": "granite", "vocab_size": 100}, {}):
        with pytest.raises(ConfigError):
            read_shape(write_config(tmp_path, values))
