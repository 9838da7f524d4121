"""Reading a config.json: accepted and rejected content, and error messages."""

import json

import pytest

from pretrain.model.config import load_model_config, preset_names
from tests.support.model_shapes import LLAMA3_ROPE, SHAPES, write_config
from tests.support.rejection import rejection


def rejection_of(model: str, overrides: str | None = None) -> str:
    return rejection(load_model_config, model, overrides)


def test_folders_files_and_preset_names_are_accepted(tmp_path):
    path = write_config(tmp_path, SHAPES["llama"])
    assert load_model_config(path) == load_model_config(str(tmp_path))
    assert load_model_config("tiny").num_layers == 4


@pytest.mark.parametrize(("model", "words"), [
    ("", "--model: it is required"),
    ("gpt2-xll", 'Did you mean "gpt2-xl"?'),
    ("nonsense", "gemma2-2b, gpt2, gpt2-large"),
    ("no/such/folder", "there is no file no/such/folder"),
    ("missing.json", "there is no file missing.json"),
])
def test_a_missing_model_is_rejected(model, words):
    assert words in rejection_of(model)


def test_a_folder_without_config_json_is_rejected(tmp_path):
    assert "config.json" in rejection_of(str(tmp_path))


@pytest.mark.parametrize(("text", "words"), [
    ("{", "Expecting property name"),
    ("[]", "found a JSON list; expected a JSON object"),
    ('{"model_type": "gpt2", "n_embd": 8, "n_embd": 16}', 'the key "n_embd" twice'),
    ("{}", "model_type: found nothing"),
    ('{"model_type": "lama"}', 'Did you mean "llama"?'),
    ('{"model_type": "t5"}', "gpt2, gpt_neox, gptj, llama, mistral"),
    ('{"model_type": "lonely", "auto_map": {}}', "--model_code my_model:MyConfig names your own code for this "
     "model_type: the code of the auto_map is never run"),
])
def test_a_file_that_is_not_a_config_is_rejected(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    assert words in rejection_of(str(tmp_path))


@pytest.mark.parametrize(("name", "changes", "words"), [
    ("gpt2", {"n_layers": 3}, 'n_layers: this is not a key of a gpt2 config. Did you mean "n_layer'),
    ("gpt2", {"num_hidden_layers": 3}, 'Did you mean "n_layer"?'),
    ("llama", {"n_embd": 3}, 'Did you mean "hidden_size"?'),
    ("llama", {"qk_norm": True}, "qk_norm: this is not a key of a llama config"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: found true; expected false"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: found true"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention: found true"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: found false; expected true"),
    ("llama", {"sliding_window": 4096}, "sliding_window: found 4096"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: found"),
    ("gpt2", {"n_layer": "3"}, 'n_layer: found "3"; expected a whole number'),
    ("gpt2", {"n_layer": True}, "n_layer: found true; expected a whole number"),
    ("gpt2", {"tie_word_embeddings": 1}, "tie_word_embeddings: found 1; expected true or false"),
    ("gpt2", {"n_layer": None}, "n_layer: found null"),
    ("gpt2", {"activation_function": "quick_gelu"}, "activation_function: found 'quick_gelu'; expected one of gelu"),
    ("gpt2", {"n_head": 5}, "n_embd: found 48; expected a multiple of n_head (5)"),
    ("gpt2", {"n_head": 0}, "n_head: found 0; expected more than 0"),
    ("gpt2", {"n_layer": -1}, "n_layer: found -1; expected more than 0"),
    ("gpt2", {"resid_pdrop": 1.5}, "resid_pdrop: found 1.5; expected a probability from 0 to below 1"),
    ("gpt2", {"initializer_range": -0.1}, "initializer_range: found -0.1"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads: found 4; expected a multiple of num_key_value_heads"),
    ("llama", {"head_dim": 7}, "7 rotary elements a head; expected an even number"),
    ("neox_parallel", {"rotary_pct": 0.2}, "rotary_pct: found 3 rotary elements"),
    ("neox_parallel", {"rotary_pct": 0.0}, "rotary_pct: found 0"),
    ("neox_parallel", {"rope_theta": 5.0}, "rope_theta: found 5.0; expected 10000.0"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type: found 'longrope'"),
    ("llama", {"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor: it is missing"),
    ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "at least 4 rotary elements"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1}}, "rope_scaling.beta_fast: found 1"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 40}}, "rope_scaling.beta_slow: found 40"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "rope_scaling.truncate: found 1"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True}}, "rope_scaling.finetuned: this is"),
    ("llama", {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn needs a rope_theta above 1"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: it is missing"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor: found 0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta: this is not a known"),
    ("llama", {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor: found 1.0"),
    ("llama", {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_theta": 3.0}},
     "the config also has rope_parameters"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: found 0.5; expected 1.0"),
    ("gptj", {"rotary": False}, "rotary: found false; expected true"),
    ("gptj", {"rotary_dim": 7}, "rotary_dim: found 7 rotary elements a head"),
    ("gptj", {"rotary_dim": None}, "rotary_dim: found null"),
    ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings: found true; expected false"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm: found true; expected false"),
    ("bloom", {"slow_but_exact": True}, "slow_but_exact: found true"),
    ("bloom", {"n_embed": 40}, "n_embed: found 40; expected 48, as hidden_size"),
    ("mpt", {"expansion_ratio": 3}, "expansion_ratio: found 3; expected 4"),
    ("mpt", {"norm_type": "rmsnorm"}, 'norm_type: found "rmsnorm"'),
    ("mpt", {"no_bias": False}, "no_bias: found false"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln: found true; expected false"),
    ("mpt", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv: found 6; expected null"),
    ("mpt", {"attn_config": {"prefix_lm": 1}}, "attn_config.prefix_lm: found 1"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi: found false; expected true"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max: found 16; expected 8"),
    ("mpt", {"attn_config": {"attn_impl": "x"}}, 'attn_config.attn_impl: found "x"; expected one of flash'),
    ("mpt", {"attn_config": {"softmax_scale": 0}}, "attn_config.softmax_scale: found 0"),
    ("mpt", {"attn_config": {"attn_pdrop": "x"}}, 'attn_config.attn_pdrop: found "x"'),
    ("mpt", {"attn_config": {"attn_pdrop": 1}}, "attn_config.attn_pdrop: found 1; expected a probability"),
    ("mpt", {"attn_config": {"attn_pdop": 0}}, 'Did you mean "attn_pdrop"?'),
    ("phi", {"qk_layernorm": True}, "qk_layernorm: found true; expected false"),
    ("stablelm", {"hidden_dropout": 0.1}, "hidden_dropout: found 0.1; expected 0.0"),
    ("starcoder2", {"sliding_window": 0}, "sliding_window: found 0"),
])
def test_unimplemented_and_impossible_models_are_rejected(tmp_path, name, changes, words):
    path = write_config(tmp_path, {**SHAPES[name], **changes})
    message = rejection_of(path)
    assert words in message
    assert path in message


def test_keys_that_do_not_change_the_model_are_accepted(tmp_path):
    values = {**SHAPES["gpt2"], "architectures": ["GPT2LMHeadModel"], "_name_or_path": "x", "torch_dtype": "float32",
              "eos_token_id": 5, "use_cache": True, "summary_type": "cls_index", "n_ctx": 64, "pruned_heads": {}}
    plain = load_model_config(write_config(tmp_path / "plain", SHAPES["gpt2"]))
    assert vars(load_model_config(write_config(tmp_path, values))) == {**vars(plain), "hf_config": values}


def test_old_and_new_rotary_keys_are_equivalent(tmp_path):
    base = {key: value for key, value in SHAPES["neox_sequential"].items() if not key.startswith("rotary")}
    old = load_model_config(write_config(tmp_path, {**base, "rotary_pct": 0.5, "rotary_emb_base": 700}))
    new = load_model_config(write_config(tmp_path, {**base, "rope_parameters": {
        "rope_theta": 700.0, "partial_rotary_factor": 0.5, "rope_type": "default"}}))
    assert (old.rope_theta, old.rotary_size, old.rope_scaling) == (new.rope_theta, new.rotary_size, new.rope_scaling)
    assert (old.rope_theta, old.rotary_size, old.rope_scaling) == (700.0, 8, None)


def test_overrides_change_the_model_and_keep_their_types():
    config = load_model_config("gpt2", "n_layer=4, vocab_size=8000,tie_word_embeddings=false,resid_pdrop=0,n_inner=64,"
                                       "activation_function=gelu,eos_token_id=7")
    assert (config.num_layers, config.vocab_size, config.intermediate_size) == (4, 8000, 64)
    assert (config.tie_word_embeddings, config.residual_dropout, config.activation) == (False, 0.0, "gelu")
    assert config.hf_config["eos_token_id"] == 7
    assert json.loads(json.dumps(config.hf_config))["n_layer"] == 4
    assert load_model_config("llama3-1b", "rope_scaling=none,rope_theta=1e6").rope_scaling is None


@pytest.mark.parametrize(("overrides", "words"), [
    ("n_layers=4", '--model_overrides n_layers: this is not a key of a gpt2 config.json. '
                   'Did you mean "n_layer"?'),
    ("num_layers=4", 'Did you mean "n_layer"?'),
    ("hidden_size=4", 'Did you mean "n_embd"?'),
    ("n_layer", "found 'n_layer'; expected key=value"),
    ("n_layer=", "expected key=value"),
    ("n_layer=4.5", "n_layer: found '4.5'; expected a whole number"),
    ("n_layer=none", "n_layer: found 'none'"),
    ("tie_word_embeddings=yes", "tie_word_embeddings: found 'yes'; expected true or false"),
    ("n_layer=2,n_layer=3", "n_layer: the key is given twice"),
    ("model_type=llama", "model_type: this is not a key of a gpt2 config.json"),
    ("scale_attn_by_inverse_layer_idx=true", "--model_overrides: scale_attn_by_inverse_layer_idx: found true"),
    ("n_head=5", "n_embd: found 768; expected a multiple of n_head (5)"),
    ("n_embd=4", "--model_overrides n_embd: found 4; expected a multiple of n_head (12)"),  # heads of 0 elements
    ("resid_pdrop=1", "--model_overrides resid_pdrop: found 1.0; expected a probability from 0 to below 1"),
])
def test_bad_overrides_are_rejected(overrides, words):
    assert words in rejection_of("gpt2", overrides)


def test_nested_values_cannot_be_overridden():
    assert "the value is an object: { ... }, which this flag does not read. Write it into a config.json" in \
        rejection_of("llama3-1b", "rope_scaling=linear")


def test_every_field_has_a_key_in_the_config_json():
    for name in preset_names():
        config = load_model_config(name)
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_positions"):
            assert config.hf_config[config.key(field)] == getattr(config, field)
