"""Layer files of GPT-NeoX and Megatron-DeepSpeed: positions, names, orders of rows, and settings of published models.

The files are made from tiny models of transformers, head by head, as the conversion scripts of the programs do it:
tools/ckpts/convert_neox_to_hf.py of GPT-NeoX, tools/hf2megads_weight_converter.py of Megatron-DeepSpeed, and
convert_bloom_original_checkpoint_to_pytorch.py of transformers.
"""

import argparse
import enum
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pretrain.errors import ConfigError
from pretrain.extensions.adopt.megatron.config import neox_config
from pretrain.extensions.adopt.megatron.layers import read
from pretrain.extensions.adopt.sources import find_source
from pretrain.model.config import model_config_from
from tests.support.hf_models import hf_model
from tests.support.rejection import rejection

RANKS = 2
HEADS, HIDDEN, LAYERS = 4, 32, 2
Layers = dict[int, dict[str, torch.Tensor]]  # parameters of one rank by layer

_SIZES = {"vocab_size": 96, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
          "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {"model_type": "bloom", "vocab_size": 96, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
    "llama": {"model_type": "llama", **_SIZES, "num_key_value_heads": 2, "intermediate_size": 48,
              "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS,
             "n_positions": 64},
    "gpt_neox": {"model_type": "gpt_neox", **_SIZES, "intermediate_size": 128, "use_parallel_residual": True,
                 "tie_word_embeddings": False},
}


class PositionEmbeddingType(enum.Enum):
    """The enumeration of BigScience's Megatron-DeepSpeed, which pickles name as megatron.enums."""

    rotary = 1
    alibi = 3


def part(tensor: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(RANKS, dim)[rank].clone()


def bloom(state: dict[str, torch.Tensor], rank: int) -> Layers:
    """BigScience's layers: the first block is layer 3. Its rows of query_key_value are those of transformers."""
    layers = {1: {"word_embeddings.weight": part(state["transformer.word_embeddings.weight"], rank),
                  **{f"word_embeddings.norm.{kind}": state[f"transformer.word_embeddings_layernorm.{kind}"]
                     for kind in ("weight", "bias")}}}
    for block in range(LAYERS):
        prefix = f"transformer.h.{block}."
        split = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        copies = [name for name in split if "layernorm" in name or name.endswith(("dense.bias", "4h_to_h.bias"))]
        layers[3 + block] = {name: tensor if name in copies else part(
            tensor, rank, 1 if name.endswith(("attention.dense.weight", "4h_to_h.weight")) else 0)
                             for name, tensor in split.items()}
    layers[4 + LAYERS] = {kind: state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    return layers


def llama(state: dict[str, torch.Tensor], rank: int) -> Layers:
    """Layers of Megatron-DeepSpeed: for each key head its queries, its key, its value; gate before up."""
    layers = {1: {"word_embeddings.weight": part(state["model.embed_tokens.weight"], rank)},
              2 + LAYERS: {"weight": state["model.norm.weight"]},
              3 + LAYERS: {"lm_head.weight": part(state["lm_head.weight"], rank)}}
    size = HIDDEN // HEADS
    for block in range(LAYERS):
        at = f"model.layers.{block}."
        q, k, v = (state[f"{at}self_attn.{name}_proj.weight"].split(size) for name in "qkv")
        rows = [matrix for key in range(rank, rank + 1) for matrix in (q[2 * key], q[2 * key + 1], k[key], v[key])]
        layers[2 + block] = {
            "input_layernorm.weight": state[f"{at}input_layernorm.weight"],
            "post_attention_layernorm.weight": state[f"{at}post_attention_layernorm.weight"],
            "self_attention.query_key_value.weight": torch.cat(rows),
            "self_attention.dense.weight": part(state[f"{at}self_attn.o_proj.weight"], rank, 1),
            "mlp.dense_h_to_4h.weight": torch.cat([part(state[f"{at}mlp.{name}_proj.weight"], rank)
                                                   for name in ("gate", "up")]),
            "mlp.dense_4h_to_h.weight": part(state[f"{at}mlp.down_proj.weight"], rank, 1)}
    return layers


def gpt2(state: dict[str, torch.Tensor], rank: int) -> Layers:
    """Layers of the newest Megatron-DeepSpeed: all queries, all keys, all values. Matrices are transposed."""
    layers = {1: {"word_embeddings.weight": part(state["transformer.wte.weight"], rank),
                  "position_embeddings.weight": state["transformer.wpe.weight"]},
              2 + LAYERS: {kind: state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}}
    names = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "mlp.c_fc": "mlp.dense_h_to_4h",
             "attn.c_attn": "self_attention.query_key_value", "attn.c_proj": "self_attention.dense",
             "mlp.c_proj": "mlp.dense_4h_to_h"}
    for block in range(LAYERS):
        layers[2 + block] = {}
        for theirs, name in names.items():
            for kind in ("weight", "bias"):
                tensor = state[f"transformer.h.{block}.{theirs}.{kind}"]
                tensor = tensor.t() if tensor.dim() == 2 else tensor
                if "query" in name:
                    tensor = torch.cat([part(rows, rank) for rows in tensor.chunk(3)])
                elif "h_to_4h" in name:
                    tensor = part(tensor, rank)
                elif tensor.dim() == 2:
                    tensor = part(tensor, rank, 1)
                layers[2 + block][f"{name}.{kind}"] = tensor
    return layers


def gpt_neox(state: dict[str, torch.Tensor], rank: int) -> Layers:
    """Layers of GPT-NeoX with its first names; with a parallel residual, biases of row-parallel layers are summands."""
    layers = {0: {"word_embeddings.weight": part(state["gpt_neox.embed_in.weight"], rank)},
              3 + LAYERS: {f"norm.{kind}": state[f"gpt_neox.final_layer_norm.{kind}"] for kind in ("weight", "bias")},
              4 + LAYERS: {"final_linear.weight": part(state["lm_head.weight"], rank)}}
    for block in range(LAYERS):
        prefix = f"gpt_neox.layers.{block}."
        layers[2 + block] = {"attention.rotary_emb.inv_freq": torch.ones(4)}
        for name, tensor in ((name.removeprefix(prefix), tensor) for name, tensor in state.items()
                             if name.startswith(prefix) and "rotary" not in name):
            if name.endswith(("attention.dense.bias", "dense_4h_to_h.bias")):
                tensor = tensor * (0.25 if rank else 0.75)
            elif "layernorm" not in name:
                tensor = part(tensor, rank, 1 if name.endswith(("attention.dense.weight", "4h_to_h.weight")) else 0)
            layers[2 + block][name] = tensor
    return layers


def megatron_args(**others: Any) -> argparse.Namespace:
    return argparse.Namespace(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, seq_length=64,
                              max_position_embeddings=64, bias_gelu_fusion=True, **others)


SPLITS: dict[str, tuple[Callable[[dict[str, torch.Tensor], int], Layers], Any]] = {
    "bloom": (bloom, megatron_args(position_embedding_type=PositionEmbeddingType.alibi, embed_layernorm=True)),
    "llama": (llama, megatron_args(normalization="rmsnorm", swiglu=True, use_rotary_position_embeddings=True,
                                   add_bias_linear=False, untie_embeddings_and_output_weights=True,
                                   num_key_value_heads=2, layernorm_epsilon=1e-6)),
    "gpt2": (gpt2, megatron_args(ds_sequence_parallel_fpdt=False)),
    "gpt_neox": (gpt_neox, {"num-layers": LAYERS, "hidden-size": HIDDEN, "num-attention-heads": HEADS,
                            "max-position-embeddings": 64, "pos-emb": "rotary", "rotary-pct": 0.25,
                            "no-weight-tying": True, "gpt-j-residual": True}),
}


@pytest.fixture
def megatron_enums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pickle find the enumeration where the program has it."""
    module = types.ModuleType("megatron.enums")
    module.PositionEmbeddingType = PositionEmbeddingType
    monkeypatch.setattr(PositionEmbeddingType, "__module__", "megatron.enums")
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.enums", module)


def write_layers(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write layer files, settings and mp-rank files of a tiny model, and return its transformers tensors."""
    split, settings = SPLITS[name]
    model = hf_model(folder / "hf", MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    state = {key: tensor.detach() for key, tensor in model.named_parameters()}
    if "embed_out.weight" in state:  # transformers before 5.14
        state["lm_head.weight"] = state["embed_out.weight"]
    for rank in range(RANKS):
        for index, parameters in split(state, rank).items():
            torch.save({key: tensor.clone() for key, tensor in parameters.items()},
                       folder / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
        client = {"args": settings} if isinstance(settings, argparse.Namespace) else {}
        torch.save({"global_steps": 7, **client}, folder / f"mp_rank_{rank:02d}_model_states.pt")
    if isinstance(settings, dict):
        (folder / "configs").mkdir()
        (folder / "configs/model.yml").write_text(yaml.safe_dump(settings))
    return state


@pytest.mark.usefixtures("megatron_enums")
@pytest.mark.parametrize("name", SPLITS)
def test_parts_of_all_ranks_make_the_model(name: str, tmp_path: Path) -> None:
    expected = write_layers(tmp_path, name)
    for module in ("megatron.enums", "megatron"):
        sys.modules.pop(module, None)  # the reader must not need them
    run = read(tmp_path, None)
    assert run.config["model_type"] == name
    model_config_from(run.config, "config.json")
    for key in run.shapes:
        assert torch.equal(run.read(key, "fp32"), expected[key]), key
    assert {key for key in expected if key not in run.shapes} <= {"lm_head.weight", "embed_out.weight"}
    assert [omission.name for omission in run.omissions] == ["optimizer"] + ["other_states"] * (name == "gpt_neox")


def test_a_model_without_a_pipeline_is_read(tmp_path: Path) -> None:
    expected = write_layers(tmp_path, "gpt_neox")
    for rank in range(RANKS):
        module = {}
        for path in sorted(tmp_path.glob(f"layer_*-model_{rank:02d}-model_states.pt")):
            index = int(path.name[6:8])
            module |= {f"sequential.{index}.{name}": tensor for name, tensor in torch.load(path).items()}
            path.unlink()
        torch.save({"global_steps": 7, "module": module}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    source = find_source(tmp_path, step=None, config=None)
    assert source is not None
    run = source.read()
    assert run.program == "GPT-NeoX, no pipeline, tensor parallelism 2"
    for key in run.shapes:
        assert torch.equal(run.read(key, "fp32"), expected[key]), key
    module["language_model.weight"] = torch.ones(2)
    torch.save({"global_steps": 7, "module": module}, tmp_path / "mp_rank_01_model_states.pt")
    with pytest.raises(ConfigError, match="only pipelines, with files layer_LL"):
        read(tmp_path, None)


# settings of published models, and the values of their config.json in transformers
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Pythia 410M": (
        {"num-layers": 24, "hidden-size": 1024, "num-attention-heads": 16, "seq-length": 2048,
         "max-position-embeddings": 2048, "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": True,
         "gpt-j-residual": True, "output-layer-parallelism": "column", "bias-gelu-fusion": True,
         "attention-config": [[["flash"], 24]], "hidden-dropout": 0, "attention-dropout": 0},
        {"model_type": "gpt_neox", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "max_position_embeddings": 2048, "rotary_pct": 0.25, "use_parallel_residual": True, "layer_norm_eps": 1e-5,
         "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "gelu_fast"}),
    "Llama 2 7B": (
        {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096,
         "max_position_embeddings": 4096, "pos_emb": "rotary", "rotary_pct": 1, "no_weight_tying": True,
         "gpt_j_residual": False, "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-5, "use_bias_in_norms": False,
         "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "activation": "swiglu"},
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 32,
         "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_models(name: str) -> None:
    settings, expected = PUBLISHED[name]
    settings = {key.replace("-", "_"): value for key, value in settings.items()}
    found = neox_config(settings, "configs", vocab_size=50304, intermediate_size=4096)
    assert {key: found[key] for key in expected} == expected
    model_config_from(found, "config.json")


@pytest.mark.parametrize(("setting", "message"), [
    ({"gpt_j_tied": True}, "gpt_j_tied is True"),
    ({"attention_config": [[["mamba"], 12]]}, "attention_config has mamba"),
    ({"pos_emb": "alibi"}, "pos_emb alibi"), ({"activation": "mish"}, "activation is mish"),
    ({"norm": "scalenorm"}, "norm scalenorm"), ({"hidden_size": "big"}, "hidden_size: found big"),
    ({"moe_num_experts": 8}, "moe_num_experts is 8"), ({"use_mup": True}, "use_mup is True"),
])
def test_settings_without_counterpart_need_a_config(setting: dict[str, Any], message: str) -> None:
    settings = {key.replace("-", "_"): value for key, value in PUBLISHED["Pythia 410M"][0].items()} | setting
    with pytest.raises(ConfigError, match="--model") as error:
        neox_config(settings, "configs", vocab_size=50304, intermediate_size=4096)
    assert message in str(error.value)


def test_settings_that_contradict_each_other_are_rejected(tmp_path: Path) -> None:
    write_layers(tmp_path, "gpt_neox")
    for text, message in (("hidden_size: 64", "found 64; expected 32, as in another file"), ("- 1", "it is no mapping"),
                          ("a: [", "it cannot be read"), ("num-layers: 3\n" * 2, "found 3; expected 2")):
        (tmp_path / "configs/other.yml").write_text(text)
        assert message in rejection(read, tmp_path, None)
