"""Logits, weights and gradients, compared with transformers' models with the same random weights."""

import copy
import functools
import itertools
import logging

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.functional import cross_entropy

from pretrain.model.config import load_model_config
from pretrain.model.hf_names import HEAD, name_in_module, tensor_rules
from pretrain.model.hf_weights import to_transformers
from pretrain.model.layer_specs import as_module
from tests.support.hf_models import SAVES_PHI_ONCE
from tests.support.model_shapes import SHAPES, write_config
from tests.support.tensors import from_transformers

logging.getLogger("transformers").setLevel(logging.ERROR)


def build_models(name, folder):
    """Return our module and the module of transformers with equal weights. Large weights make every term count."""
    if name == "gemma_multi_query" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("this transformers reads the activation `gelu` of Gemma's first configs as the exact one")
    path = write_config(folder, SHAPES[name])
    config = load_model_config(path)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path), dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in theirs.parameters():
            center = 1.0 - config.norm_offset if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.empty_like(parameter).normal_(center, 0.15, generator=generator))
    ours = as_module(config).eval()
    ours.load_state_dict(from_transformers(theirs.state_dict(), config))
    return config, ours, theirs


@pytest.fixture(scope="module")
def both_models(tmp_path_factory):
    """Return a function that builds both models of a name once. No test changes them, except their gradients."""
    return functools.cache(lambda name: build_models(name, tmp_path_factory.mktemp(name)))


def tokens_for(config, length=40):
    return torch.randint(0, config.vocab_size, (3, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_transformers(name, both_models):
    config, ours, theirs = both_models(name)
    tokens = tokens_for(config)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "llama_dynamic_rope"])
def test_packed_documents_have_the_logits_of_transformers_for_each_document(name, both_models):
    config, ours, theirs = both_models(name)
    tokens, bounds = tokens_for(config), (0, 7, 8, 30, 40)
    positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(bounds)]).repeat(3, 1)
    with torch.no_grad():
        found = ours(tokens, positions_BT=positions)
        for start, stop in itertools.pairwise(bounds):
            torch.testing.assert_close(found[:, start:stop], theirs(tokens[:, start:stop]).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_multi_query", "neox_parallel"])
def test_transformers_computes_packed_documents_in_the_same_way(name, both_models):
    """Given positions that restart, transformers masks other documents itself."""
    config, ours, theirs = both_models(name)
    tokens, positions = tokens_for(config)[:1], torch.tensor([[*range(7), *range(33)]])
    with torch.no_grad():
        expected = theirs(tokens, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(ours(tokens, positions_BT=positions), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_survive_a_round_trip_exactly(name, both_models):
    config, ours, theirs = both_models(name)
    exported = to_transformers(ours.state_dict(), config)
    assert set(exported) == set(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(exported[key], value), key
    theirs.load_state_dict(exported, strict=True)
    back = from_transformers(exported, config)
    assert list(back) == list(ours.state_dict())
    assert all(torch.equal(back[key], value) for key, value in ours.state_dict().items())


@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_equal_those_of_transformers(name, both_models):
    config, ours, theirs = both_models(name)
    tokens = tokens_for(config, length=41)
    ours.zero_grad()
    theirs.zero_grad()
    expected = cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    count = tokens[:, 1:].numel()
    loss = ours(tokens[:, :-1], tokens[:, 1:], torch.full((3, 40), 1 / count))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    if config.tie_word_embeddings:
        gradients[name_in_module(HEAD, config)] = gradients[tensor_rules(config)[0].theirs[0]]
    for key, value in from_transformers(gradients, config).items():
        torch.testing.assert_close(ours.get_parameter(key).grad, value, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "rounding"), [("gemma_multi_query", 2**-8), ("qwen3", 2**-7), ("olmo2", 2**-8)])
def test_embeddings_and_norms_in_bf16_equal_those_of_transformers(name, rounding, both_models):
    """The scale of the embeddings is rounded to bf16. Norms are computed in fp32; Qwen's are rounded twice there."""
    config, ours, theirs = both_models(name)
    ours, theirs = copy.deepcopy(ours).bfloat16(), copy.deepcopy(theirs).bfloat16()
    tokens = tokens_for(config)
    with torch.no_grad():
        embedded = ours.layers[0](tokens)
        assert torch.equal(embedded, theirs.model.embed_tokens(tokens))
        torch.testing.assert_close(ours.layers[-2](embedded), theirs.model.norm(embedded), atol=0, rtol=rounding)


def test_weights_of_another_model_are_an_error(both_models):
    config, ours, _ = both_models("gpt2")
    with pytest.raises(AssertionError, match=r"1\.embedding"):
        to_transformers({key: value for key, value in ours.state_dict().items() if key != "1.embedding"}, config)


@SAVES_PHI_ONCE
def test_a_config_saved_by_transformers_gives_the_same_model(tmp_path):
    """transformers 5 writes rope_parameters and all defaults. This file must give the same ModelConfig."""
    for name, values in SHAPES.items():
        config = load_model_config(write_config(tmp_path / name, values))
        transformers.AutoConfig.from_pretrained(tmp_path / name).save_pretrained(tmp_path / name / "saved")
        saved = load_model_config(str(tmp_path / name / "saved"))
        assert {**vars(saved), "hf_config": None} == {**vars(config), "hf_config": None}
