"""Presets have the published sizes, and give the same model as in transformers."""

import subprocess
import sys

import pytest
import torch
import transformers

from pretrain.model.config import PRESETS, load_model_config, preset_names
from pretrain.model.layer_specs import as_module

PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "pythia-14m": 14_067_712, "pythia-31m": 30_494_720, "pythia-70m": 70_426_624, "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320,
    "llama3-1b": 1_235_814_400, "llama3-3b": 3_212_749_824, "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496, "llama2-7b": 6_738_415_616, "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "gemma2-2b": 2_614_341_888, "olmo2-1b": 1_484_916_736, "olmo2-7b": 7_298_617_344,
    "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624, "olmoe-1b-7b": 6_919_161_856,
}
# The GPT-3 paper rounds the sizes. The presets have the paper's layers and widths, except that 13B has width 5,120, a
# multiple of its 40 heads.
GPT3_BILLIONS = {"125m": 0.125, "350m": 0.35, "760m": 0.76, "1.3b": 1.3, "2.7b": 2.7, "6.7b": 6.7, "13b": 13,
                 "175b": 175}


def test_the_list_of_presets_is_complete():
    assert set(preset_names()) == {*PUBLISHED, *(f"gpt3-{size}" for size in GPT3_BILLIONS), "tiny",
                                   "tiny-moe"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_equal_the_published_counts(name):
    assert load_model_config(name).num_parameters() == PUBLISHED[name]


def test_active_parameters_of_models_with_experts_equal_the_published_counts():
    """Model cards: 12.9, 3.3 (3.35, not rounded up) and 1.3 billion."""
    active = {name: load_model_config(name).num_parameters(active=True) // 10**7 / 100
              for name in ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b")}
    assert active == {"mixtral-8x7b": 12.87, "qwen3-30b-a3b": 3.35, "olmoe-1b-7b": 1.28}


@pytest.mark.parametrize("size", GPT3_BILLIONS)
def test_gpt3_sizes_are_close_to_their_names(size):
    assert load_model_config(f"gpt3-{size}").num_parameters() == pytest.approx(GPT3_BILLIONS[size] * 1e9, rel=0.02)


@pytest.mark.parametrize("name", preset_names())
def test_transformers_builds_the_same_model_from_the_file(name):
    config = load_model_config(name)
    theirs = transformers.AutoConfig.from_pretrained(PRESETS / f"{name}.json")
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in as_module(config).parameters())
        expected = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(theirs).parameters())
    assert config.num_parameters() == built == expected
    assert (config.hidden_size, config.num_layers, config.num_heads, config.max_positions) == (
        theirs.hidden_size, theirs.num_hidden_layers, theirs.num_attention_heads, theirs.max_position_embeddings)
    if config.position == "rope":
        rope = theirs.rope_parameters
        assert config.rope_theta == rope["rope_theta"]
        assert config.rotary_size == config.head_size * rope.get("partial_rotary_factor", 1.0)
        assert (config.rope_scaling or {"rope_type": "default"})["rope_type"] == rope["rope_type"]


def test_reading_a_preset_imports_no_torch_and_no_transformers():
    program = ("import sys; from pretrain.model.config import load_model_config; load_model_config('llama3-8b');"
               "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules), 'imported'")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PRESETS.parents[2], timeout=900)
