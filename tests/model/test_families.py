"""Families of models: defaults, null values and attention windows are transformers'; the rest is rejected."""

import json
import logging
import re

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from pretrain.errors import ConfigError
from pretrain.model.config import PRESETS, model_config_from, preset_names
from pretrain.model.families import FAMILIES
from pretrain.model.families.position_keys import PREFERABLY_NESTED
from tests.support.hf_models import needs_transformers
from tests.support.model_shapes import SHAPES
from tests.support.rejection import rejection

logging.getLogger("transformers").setLevel(logging.ERROR)
ROOT = PRESETS.parents[2]
# null values that transformers' configs accept, although its models then fail
FAILING_NULLS = {family: {"rope_theta"} for family in FAMILIES}
FAILING_NULLS |= {"gemma2": {"rope_theta", "sliding_window"}, "gpt_neox": {"rotary_pct", "rotary_emb_base"},
                  "gemma3_text": {"rope_theta", "rope_local_base_freq", "sliding_window"}}


def fields(values):
    """Return the fields of the model config, without the config.json."""
    return {**vars(model_config_from(values, "test")), "hf_config": None}


def complete(config):
    """Return all values of a config of transformers, as it writes them with use_diff=False."""
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    theirs = transformers.AutoConfig.for_model(family)
    assert fields({"model_type": family}) == fields(complete(theirs))


def transformers_accepts(values):
    try:
        transformers.AutoConfig.for_model(**values)
    except (StrictDataclassError, TypeError, AttributeError):
        return False
    return True


def is_accepted(values):
    try:
        model_config_from(values, "test")
    except ConfigError:
        return False
    return True


@needs_transformers("5.5", "it does not check the types of values")
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"bloom"}))  # BLOOM's keys have a second name each
def test_null_is_accepted_where_transformers_accepts_it(family):
    nulls = {key: {"model_type": family, key: None} for key in FAMILIES[family].keys}
    accepted = {key for key, values in nulls.items() if is_accepted(values)}
    assert accepted == {key for key, values in nulls.items() if transformers_accepts(values)} - FAILING_NULLS[family]


@needs_transformers("5.20", "it keeps the older key next to the value in rope_parameters")
@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in FAMILIES.items()
                                             for key in keys.keys if key in PREFERABLY_NESTED])
def test_null_is_accepted_where_rope_parameters_has_the_value(family, key):
    """transformers reads the value in rope_parameters, and ignores the older key."""
    rope = {"rope_type": "default", "rope_theta": 700.0}
    if family in ("gpt_neox", "phi", "stablelm"):
        rope["partial_rotary_factor"] = 0.5
    if family == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    values = {"model_type": family, key: None, "rope_parameters": rope}
    assert fields(values) == fields(complete(transformers.AutoConfig.for_model(**values)))


@pytest.mark.parametrize("values", [
    {"rope_theta": 5000.0}, {"partial_rotary_factor": 0.5}, {"rope_theta": 5000.0, "rotary_emb_base": 20000.0},
])
def test_a_key_that_transformers_ignores_is_rejected_with_the_key_that_it_reads(values):
    ignored = next(iter(values))
    theirs = transformers.AutoConfig.for_model("gpt_neox", **values).rope_parameters
    own = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}[ignored]
    with pytest.raises(ConfigError, match=f"expected {theirs[ignored]}. .* ignores {ignored} and reads {own} or"):
        fields({"model_type": "gpt_neox", **values})
    fields({"model_type": "gpt_neox", own: values[ignored]})


@pytest.mark.parametrize(("name", "changes"), [
    ("qwen2_tied", {}),
    ("qwen2_tied", {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2_tied", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen2_tied", {"use_sliding_window": True, "max_window_layers": 9}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None}),
    ("qwen3_layer_types_bias_tied", {}),
    ("gemma2", {"num_hidden_layers": 5}),
    ("gemma2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    ("gemma3", {"num_hidden_layers": 13, "sliding_window_pattern": 6}),
    ("gemma3", {"num_hidden_layers": 7, "sliding_window_pattern": 3}),
    ("gemma3", {"sliding_window_pattern": 1}),
])
def test_the_layers_with_a_window_are_those_of_transformers(name, changes):
    values = {**SHAPES[name], **changes}
    theirs = transformers.AutoConfig.for_model(**values)
    expected = [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types]
    ours = model_config_from(values, "test")
    assert [ours.window(index) for index in range(ours.num_layers)] == expected


def test_all_layers_of_mistral_have_the_window():
    assert model_config_from(SHAPES["mistral_multi_query"], "test").windows == (12, 12, 12)
    assert model_config_from(SHAPES["mistral_no_window_tied"], "test").windows == ()


@pytest.mark.parametrize(("name", "changes", "words"), [
    ("mistral_multi_query", {"sliding_window": 0}, "sliding_window: found 0; expected a number of tokens from 1"),
    ("mistral_multi_query", {"layer_types": ["full_attention"] * 3}, "layer_types: found"),
    ("qwen2_tied", {"use_mrope": True}, "use_mrope: found true; expected false"),
    ("qwen2_tied", {"layer_types": ["sliding_attention"] * 3}, "no window applies. Set use_sliding_window to true"),
    ("qwen3", {"layer_types": ["full_attention"] * 2}, "found a list of length 2; expected one entry for each"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 3}, 'found "chunked_attention"; expected "full_attention" or'),
    ("qwen3", {"head_dim": None}, "head_dim: found null"),
    ("gemma_multi_query", {"use_bidirectional_attention": True}, "use_bidirectional_attention: found true"),
    ("gemma_multi_query", {"hidden_activation": "silu"}, 'hidden_activation: found "silu"; expected "gelu_pytorch'),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: found true"),
    ("gemma2", {"sliding_window_size": 11}, "sliding_window_size: found 11; expected 10"),
    ("gemma2", {"sliding_window": None}, "sliding_window: found null"),
    ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping: found 0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: found 0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: found 50.0; expected null"),
    ("gemma3", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: found 'longrope'"),
    ("gemma3", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": None}, "rope_parameters.rope_theta: found"),
    ("gemma3_untied_softcap", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     'rope_parameters.sliding_attention.rope_type: found "linear"; expected "default"'),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv: this is not a key of a olmo2 config"),
])
def test_features_that_are_not_implemented_are_rejected_by_name(name, changes, words):
    assert words in rejection(model_config_from, {**SHAPES[name], **changes}, "test")


def test_older_and_newer_rotary_keys_of_gemma3_are_equivalent():
    base = {key: value for key, value in SHAPES["gemma3"].items() if not key.startswith("rope")}
    old = fields({**base, "rope_theta": 3e4, "rope_local_base_freq": 500, "rope_scaling": {"type": "linear",
                                                                                          "factor": 8.0}})
    assert old == fields({**base, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 30000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}})


@pytest.mark.parametrize("values", [
    {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
     "sliding_window": 4096, "sliding_window_size": 4096, "cache_implementation": "hybrid"},
    {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None, "rope_scaling": None},
    {"model_type": "gemma3_text", "eos_token_id": [1, 106], "rope_theta": 1000000, "rope_local_base_freq": 10000,
     "rope_scaling": None, "sliding_window_pattern": 6, "cache_implementation": "hybrid"},
    {"model_type": "qwen2", "use_mrope": False, "sliding_window": 131072, "max_window_layers": 28},
    {"model_type": "qwen3", "sliding_window": None, "max_window_layers": 36, "rope_scaling": None},
    {"model_type": "mistral", "sliding_window": None, "head_dim": 128, "rope_theta": 1000000.0},
    {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None, "_name_or_path": "x", "max_length": 4096},
    {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}},
    {"model_type": "llama", "max_sequence_length": 2048, "pad_token_id": 0},
    {"model_type": "gpt2", "n_special": 0, "predict_special_tokens": True, "output_past": True, "n_ctx": 1024},
    {"model_type": "gpt_neox", "hidden_act": "gelu_fast", "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    {"model_type": "starcoder2", "activation_function": "gelu", "hidden_act": "gelu_pytorch_tanh",
     "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "mlp_type": "default", "scale_attn_weights": True},
])
def test_keys_of_published_configs_are_accepted(values):
    assert model_config_from(values, "test").architecture == values["model_type"]


def test_the_pages_list_all_families_and_presets():
    page = (ROOT / "pretrain/pages/models.md").read_text()
    section = page.split("## Families of models")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ") and "`" in line][1:]
    assert sorted(row[1].strip("`") for row in rows) == sorted(FAMILIES)
    named = re.findall("`([^`]*)`", " ".join(row[5] for row in rows))
    assert set(named) <= set(preset_names())
    for name in preset_names():  # a range such as "`pythia-14m` to `pythia-12b`" names the first and the last
        assert name in named or any(name.startswith(other.split("-")[0]) for other in named), name
    assert re.search(rf"\b{len(FAMILIES)}\s+\[families\]", (ROOT / "README.md").read_text())
