"""Layers, loss and initial weights of the plain module."""

import dataclasses
import math

import pytest
import torch

from pretrain.config.model_of_run import DROPOUTS
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import CausalLM, as_module
from pretrain.model.layers.rope import Rope, inverse_frequencies
from pretrain.model.parameters import check_dtype
from tests.support.model_shapes import SHAPES, write_config

INITIAL_SHAPES = ["gpt2", "llama", "llama_tied_llama3_rope", "neox_parallel"]


def build(name: str, tmp_path, seed: int = 1, **changes: object) -> tuple[ModelConfig, CausalLM]:
    config = load_model_config(write_config(tmp_path, {**SHAPES[name], **changes}))
    module = as_module(config)
    initialize_parameters(module, config, seed=seed)
    return config, module


@pytest.mark.parametrize("name", INITIAL_SHAPES)
def test_initial_loss_is_the_loss_of_uniform_probabilities(name, tmp_path):
    config, module = build(name, tmp_path, vocab_size=4000)
    tokens = torch.randint(0, config.vocab_size, (8, 65), generator=torch.Generator().manual_seed(1))
    loss = module(tokens[:, :-1], tokens[:, 1:], torch.full((8, 64), 1 / 512))
    assert loss.item() == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_weights_in_another_precision_than_the_chosen_one_are_rejected(tmp_path):
    _, module = build("llama", tmp_path)
    check_dtype(module, "fp32")
    with pytest.raises(ConfigError, match=r"found weights in torch\.float32; expected torch\.bfloat16"):
        check_dtype(module, "bf16")
    weight = next(module.parameters())
    weight.ds_tensor = weight.detach().half()  # a partition of ZeRO-3, whose precision counts
    with pytest.raises(ConfigError, match=r"found weights in torch\.float16; expected torch\.float32"):
        check_dtype(module, "fp32")


@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_causal(name, tmp_path):
    config, module = build(name, tmp_path)
    tokens = torch.randint(0, config.vocab_size, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % config.vocab_size
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    # an expert has other tokens after the change, and a product with another number of rows may round differently
    torch.testing.assert_close(before[:, :12], after[:, :12], atol=1e-6 if config.num_experts else 0, rtol=0)
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("name", SHAPES)
def test_the_config_lists_the_parameters_of_the_module(name, tmp_path):
    config, module = build(name, tmp_path)
    shapes = [(key, tuple(parameter.shape)) for key, parameter in module.named_parameters()]
    assert [(name, parameter.shape) for name, parameter in config.named_parameters()] == shapes
    assert config.num_parameters() == sum(math.prod(shape) for _, shape in shapes)


@pytest.mark.parametrize("name", SHAPES)
def test_custom_kernels_in_bf16_give_the_loss_and_gradients_of_fp32(name, tmp_path):
    """The sequence is longer than a block of the attention kernel."""
    config, module = build(name, tmp_path, **({"n_positions": 160} if name.startswith("gpt2") else {}))
    tokens = torch.randint(0, config.vocab_size, (2, 151), generator=torch.Generator().manual_seed(1))
    results = []
    for model in (module, as_module(config).bfloat16()):
        model.load_state_dict(module.state_dict())
        loss = model(tokens[:, :-1], tokens[:, 1:], torch.full((2, 150), 1 / 300))
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])
        results.append((loss.item(), gradient))
    (exact_loss, exact), (loss, gradient) = results
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    assert torch.nn.functional.cosine_similarity(gradient, exact, dim=0) > 0.999


def test_a_completely_masked_micro_batch_gives_zero_instead_of_nan(tmp_path):
    config, module = build("gpt2", tmp_path)
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    loss = module(tokens[:, :-1], tokens[:, 1:], torch.zeros(2, 8))
    loss.backward()
    assert loss.item() == 0
    assert all(torch.count_nonzero(parameter.grad) == 0 for parameter in module.parameters())


def test_initial_weights_in_bf16_are_the_rounded_fp32_weights(tmp_path):
    config, module = build("llama", tmp_path)
    low = as_module(config).bfloat16()
    initialize_parameters(low, config, seed=1)
    assert all(torch.equal(low.state_dict()[key], value.bfloat16()) for key, value in module.state_dict().items())


def test_rope_keeps_its_precision_when_the_module_is_cast(tmp_path):
    """The engine casts parameters and buffers to bf16. The rotation angles must still be computed in fp32."""
    config, module = build("llama", tmp_path, max_position_embeddings=4096)
    module.bfloat16()
    assert list(module.buffers()) == []
    rope = module.get_submodule("1.attention").rope
    cos, _ = rope.tables(4096, torch.zeros(1, dtype=torch.bfloat16))
    exact = (torch.arange(4096, dtype=torch.float64)[:, None] * inverse_frequencies(config).double()).cos()
    # half a unit in the last place of bf16 at 1, plus the fp32 rounding error of the angle
    assert (cos.double() - exact).abs().max() < 0.005


def test_rope_tables_grow_and_are_shared_by_the_layers(tmp_path):
    config, module = build("llama", tmp_path)
    ropes = {id(module.get_submodule(f"{index}.attention").rope) for index in (1, 2, 3)}
    assert len(ropes) == 1
    rope = Rope(config)
    short = rope.tables(8, torch.zeros(1))[0].clone()
    long = rope.tables(32, torch.zeros(1))[0]
    assert torch.equal(long[:8], short)
    assert rope.tables(8, torch.zeros(1))[0].shape == (8, config.rotary_size // 2)


def test_dynamic_rope_depends_on_the_length_beyond_max_positions_only(tmp_path):
    config, _ = build("llama_dynamic_rope", tmp_path)
    plain, rope = Rope(dataclasses.replace(config, rope_scaling=None)), Rope(config)
    assert config.max_positions == 16
    tables = {length: rope.tables(length, torch.zeros(1))[0].clone() for length in (8, 40, 16, 24)}
    for length, cos in tables.items():
        assert torch.equal(cos, plain.tables(length, torch.zeros(1))[0]) == (length <= 16)
        assert torch.equal(rope.tables(length, torch.zeros(1))[0], cos)
    assert not torch.equal(tables[40][:24], tables[24])


def test_local_rope_has_its_own_theta_and_no_scaling(tmp_path):
    config, _ = build("llama_yarn_rope", tmp_path)
    local = Rope(dataclasses.replace(config, local_rope_theta=70.0), local=True).tables(20, torch.zeros(1))
    plain = Rope(dataclasses.replace(config, rope_theta=70.0, rope_scaling=None)).tables(20, torch.zeros(1))
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(local, plain, strict=True))


def test_rope_tables_from_inference_mode_can_be_used_in_training(tmp_path):
    config, module = build("llama", tmp_path)
    tokens = torch.randint(0, config.vocab_size, (1, 9))
    with torch.inference_mode():
        module(tokens)
    module(tokens[:, :-1], tokens[:, 1:], torch.ones(1, 8)).backward()
    assert module.get_parameter("1.attention.qkv.weight").grad.abs().sum() > 0


def test_dropout_acts_in_training_only(tmp_path):
    for name, changes in (("gpt2", {"embd_pdrop": 0.3}), ("gpt2", {"resid_pdrop": 0.3}), ("gpt2", {"attn_pdrop": 0.3}),
                          ("neox_parallel", {"hidden_dropout": 0.3}), ("llama", {"attention_dropout": 0.3})):
        config, module = build(name, tmp_path, **changes)
        tokens = torch.randint(0, config.vocab_size, (2, 16))
        assert not torch.equal(module(tokens), module(tokens)), (name, changes)
        module.eval()
        assert torch.equal(module(tokens), module(tokens)), (name, changes)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox_parallel"])
@pytest.mark.parametrize("dropout", DROPOUTS)
def test_every_family_has_every_dropout(name, dropout, tmp_path):
    """The flags of train.py give all families dropouts for which their config.json has no keys."""
    config = dataclasses.replace(load_model_config(write_config(tmp_path, SHAPES[name])), **{dropout: 0.3})
    module = as_module(config)
    initialize_parameters(module, config, seed=1)
    tokens = torch.randint(0, config.vocab_size, (2, 16))
    assert not torch.equal(module(tokens), module(tokens))
    module.eval()
    assert torch.equal(module(tokens), module(tokens))


def test_labels_without_weights_are_rejected(tmp_path):
    config, module = build("gpt2", tmp_path)
    tokens = torch.randint(0, config.vocab_size, (1, 8))
    with pytest.raises(ValueError, match="labels_BT without weights_BT"):
        module(tokens, tokens)
