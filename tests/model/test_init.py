"""Initial weights: standard deviations of each method, muP, and the values that earlier versions had."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.hf_names import tensor_rules
from pretrain.model.init import initial_value
from pretrain.model.init_methods import INIT_METHODS, Initialization
from tests.support.model_shapes import SHAPES, write_config

LAYERS, HIDDEN, INNER, VOCAB = 4, 128, 384, 600
GOLDEN = {  # SHA-256 of the names and values of all initial weights; seed 1234
    "tiny": "019d48f3c2b8f6c3ee58a29d3f0a13d4c403ffd1a07c531f6ddf70313084083d",
    "llama3-1b": "ec1df1120c04dacd156c722c562948f72396a59e02b4ccad1df117847ce2d86d",
    "pythia-14m": "ad73223de49029ff6637e6a5b7b6b0bdfc0ffd6dde677c10ba3dc968548e7db4"}
SMALL = {"tiny": None,
         "llama3-1b": "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
                      "intermediate_size=96,vocab_size=97,head_dim=16,tie_word_embeddings=false",
         "pythia-14m": "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=96,vocab_size=97"}


def _config(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_config(folder, {
        **SHAPES["gpt2_untied"], "n_embd": HIDDEN, "n_layer": LAYERS, "n_inner": INNER, "vocab_size": VOCAB,
        "initializer_range": 0.03, **changes}))


def _values(config: ModelConfig, how: Initialization, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the initial values by name, without the blocks except the last."""
    return {rule.ours: initial_value(rule.ours, torch.Size(rule.shape), config, seed=seed, how=how)
            for rule in tensor_rules(config) if rule.ours.split(".")[0] not in ("2", "3", "4")}


@pytest.mark.parametrize("model", GOLDEN)
def test_default_initial_weights_never_change(model: str) -> None:
    config, digest = load_model_config(model, SMALL[model]), hashlib.sha256()
    for rule in tensor_rules(config):
        digest.update(rule.ours.encode())
        digest.update(initial_value(rule.ours, torch.Size(rule.shape), config, seed=1234).numpy().tobytes())
    assert digest.hexdigest() == GOLDEN[model]


def _expected(method: str, rows: int, columns: int) -> float:
    return {"normal": 0.03, "config": 0.03, "scaled_normal": 0.03 / math.sqrt(2 * LAYERS),
            "small_init": math.sqrt(2 / (5 * HIDDEN)), "wang_init": 2 / (LAYERS * math.sqrt(HIDDEN)),
            "xavier_normal": math.sqrt(2 / (rows + columns)), "xavier_uniform": math.sqrt(2 / (rows + columns))}[method]


@pytest.mark.parametrize("method", INIT_METHODS)
def test_each_method_has_its_standard_deviation(method: str, tmp_path: Path) -> None:
    """`init_method` is for all matrices except the two projections into the residual stream of each block."""
    other = INIT_METHODS[INIT_METHODS.index(method) - 1]
    values = _values(_config(tmp_path), Initialization(method, other))
    projections = [name for name in values if name.endswith(("attention.out.weight", "mlp.down.weight"))]
    assert len(projections) == 2
    for name, value in values.items():
        if value.dim() == 1:
            assert torch.all(value == (0 if name.endswith("bias") else 1)), name
            continue
        own = other if name in projections else method
        if own == "config" and name in projections:
            own = "scaled_normal"
        expected = _expected(own, *value.shape)
        assert value.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(value.mean().item()) < 0.05 * expected, name
        assert (value.abs().max().item() <= math.sqrt(3) * expected) == (own == "xavier_uniform"), name


def test_init_std_replaces_the_initializer_range(tmp_path: Path) -> None:
    values = _values(_config(tmp_path), Initialization("normal", "scaled_normal", 0.06))
    for name, value in _values(_config(tmp_path), Initialization()).items():
        assert torch.allclose(values[name], value * (2 if value.dim() > 1 else 1), rtol=1e-6), name


@pytest.mark.parametrize("method", INIT_METHODS)
def test_mup_scales_a_wide_model_from_its_base_model(method: str, tmp_path: Path) -> None:
    """The model is four times as wide as its base model, which is initialized without muP."""
    base = _values(_config(tmp_path, n_embd=HIDDEN // 4, n_inner=INNER // 4, n_head=1), Initialization(method, method))
    wide = _values(_config(tmp_path), Initialization(method, method, mup_base_width=HIDDEN // 4))
    for name, value in wide.items():
        if value.dim() == 1:
            assert torch.all(value == (0 if name.endswith("bias") else 1)), name
            continue
        ratio = 1 if name.endswith("embedding") else 1 / 4 if name.endswith("lm_head.weight") else 1 / 2
        assert (value.std() / base[name].std()).item() == pytest.approx(ratio, rel=0.05), name


def test_weights_of_the_norm_begin_as_multiplication_by_1(tmp_path: Path) -> None:
    config = replace(_config(tmp_path), norm_offset=1.0)
    norm = initial_value("2.attention.q_norm.weight", torch.Size([8]), config, seed=1)
    assert torch.equal(norm + config.norm_offset, torch.ones(8))
    assert torch.equal(initial_value("9.lm_head.bias", torch.Size([8]), config, seed=1), torch.zeros(8))


def test_values_depend_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    how = Initialization("xavier_uniform", "wang_init")
    one, other = (_values(_config(tmp_path), how, seed) for seed in (1, 2))
    assert all(torch.equal(value, _values(_config(tmp_path), how)[name]) for name, value in one.items())
    assert not any(torch.equal(value, other[name]) for name, value in one.items() if value.dim() > 1)
