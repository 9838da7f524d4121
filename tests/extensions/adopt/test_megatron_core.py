"""Checkpoints of Megatron Core; their losses after a resume are in tests/extensions/adopt/test_dcp_runs.py."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.extensions.adopt.adopt import plan_adoption
from pretrain.extensions.adopt.dcp import read
from pretrain.extensions.adopt.sources import find_source
from tests.extensions.adopt.dcp_writer import remove_optimizer, write_dcp
from tests.extensions.adopt.foreign import MODELS, Tensors, check_equal, foreign_states
from tests.support.rejection import rejection


def megatron_tensors(theirs: dict[str, torch.Tensor], model: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a model of transformers under the names of Megatron Core, all layers in one tensor."""
    gpt2 = model["model_type"] == "gpt2"
    block = "transformer.h." if gpt2 else "model.layers."

    def all_layers(name: str, kind: str = "weight") -> torch.Tensor:
        tensors = [theirs[f"{block}{layer}.{name}.{kind}"] for layer in range(2)]
        return torch.stack([tensor.t() if gpt2 and tensor.dim() == 2 else tensor for tensor in tensors])

    def by_group(parts: list[torch.Tensor]) -> torch.Tensor:
        groups = 4 if gpt2 else 2
        return torch.cat([part.reshape(2, groups, -1, *part.shape[2:]) for part in parts], 2).flatten(1, 2)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.full((rows - len(tensor), tensor.shape[1]), 9.0)])

    layers, attention, mlp = "decoder.layers.", "decoder.layers.self_attention.", "decoder.layers.mlp."
    if gpt2:
        found = {"embedding.word_embeddings.weight": padded(theirs["transformer.wte.weight"]),
                 "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"]}
        for kind in ("weight", "bias"):
            found |= {
                f"decoder.final_layernorm.{kind}": theirs[f"transformer.ln_f.{kind}"],
                f"{attention}linear_qkv.{kind}": by_group([*all_layers("attn.c_attn", kind).chunk(3, 1)]),
                f"{attention}linear_proj.{kind}": all_layers("attn.c_proj", kind),
                f"{mlp}linear_fc1.{kind}": all_layers("mlp.c_fc", kind),
                f"{mlp}linear_fc2.{kind}": all_layers("mlp.c_proj", kind),
                f"{layers}input_layernorm.{kind}": all_layers("ln_1", kind),
                f"{layers}pre_mlp_layernorm.{kind}": all_layers("ln_2", kind)}
        return found
    found = {"embedding.word_embeddings.weight": padded(theirs["model.embed_tokens.weight"]),
             "decoder.final_layernorm.weight": theirs["model.norm.weight"],
             f"{attention}linear_proj.weight": all_layers("self_attn.o_proj"),
             f"{mlp}linear_fc1.weight": torch.cat([all_layers("mlp.gate_proj"), all_layers("mlp.up_proj")], 1),
             f"{mlp}linear_fc2.weight": all_layers("mlp.down_proj"),
             f"{attention}linear_qkv.layer_norm_weight": all_layers("input_layernorm"),
             f"{mlp}linear_fc1.layer_norm_weight": all_layers("post_attention_layernorm")}
    for kind in ("weight", *(["bias"] if model["model_type"] == "qwen2" else [])):
        parts = [all_layers(f"self_attn.{part}_proj", kind) for part in "qkv"]
        found[f"{attention}linear_qkv.{kind}"] = by_group(parts)
    if model["model_type"] == "qwen3":
        found |= {f"{attention}{part}_layernorm.weight": all_layers(f"self_attn.{part}_norm") for part in "qk"}
    if not model.get("tie_word_embeddings"):
        found["output_layer.weight"] = padded(theirs["lm_head.weight"])
    return found


def divide_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same with a tensor for each layer, and for each half of linear_fc1."""
    found = {}
    for name, tensor in tensors.items():
        begin, _, end = name.partition("decoder.layers.")
        if not end:
            found[name] = tensor
            continue
        for layer, part in enumerate(tensor):
            key = f"{begin}decoder.layers.{layer}.{end}"
            found |= {f"{key}_w": part.chunk(2)[0], f"{key}_v": part.chunk(2)[1]} \
                if end == "mlp.linear_fc1.weight" else {key: part}
    return found


def common(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the content of common.pt at step 6."""
    gpt2, kind = model["model_type"] == "gpt2", model["model_type"]
    args = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": not gpt2,
            "num_query_groups": 1 if gpt2 else 2, "ffn_hidden_size": 128 if gpt2 else 48, "swiglu": not gpt2,
            "normalization": "LayerNorm" if gpt2 else "RMSNorm", "norm_epsilon": 1e-5, "add_bias_linear": gpt2,
            "add_qkv_bias": kind == "qwen2", "qk_layernorm": kind == "qwen3", "bias_gelu_fusion": True,
            "position_embedding_type": "learned_absolute" if gpt2 else "rope", "rotary_base": 10000,
            "untie_embeddings_and_output_weights": not (gpt2 or model.get("tie_word_embeddings")),
            "max_position_embeddings": 64, "seq_length": 64, "global_batch_size": 8, "consumed_train_samples": 48,
            "clip_grad": 1.0,
            "seed": 5, "optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "lr": 1e-3,
            "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "params_dtype": torch.float32,
            **changes}
    groups = [{"lr": 5e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay, "step": 6} for decay in (0.1, 0.0)]
    return {"args": argparse.Namespace(**args), "iteration": 6, "optimizer": {"optimizer": {"param_groups": groups}},
            "opt_param_scheduler": {"max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 16, "num_steps": 48,
                                    "lr_decay_steps": 96, "lr_decay_style": "cosine"}}


def megatron_checkpoint(folder: Path, theirs: Tensors, model: dict[str, Any], *, masters: str = "param", rows: int = 96,
                        prefix: str = "", change: Callable[[dict[str, torch.Tensor]], None] | None = None,
                        layout: Callable[..., Any] = dict, **changes: Any) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for state, values in theirs.items():
        found = {f"{prefix}{key}": tensor for key, tensor in layout(megatron_tensors(values, model, rows)).items()}
        kind = masters if state == "fp32" else state
        tensors |= {f"optimizer.state.{kind}.{key}": tensor for key, tensor in found.items()} if kind else {}
        if state == "fp32":
            tensors |= {key: tensor.to(changes.get("params_dtype", torch.float32)) for key, tensor in found.items()}
    if change is not None:
        change(tensors)
    values = {f"{prefix}decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": None, "rng_state/shard_0.0_1.1": [{}]}
    write_dcp(folder, tensors, values, splits=(2, 2))
    torch.save(common(model, **changes), folder / "common.pt")
    return folder


@pytest.mark.parametrize(("name", "settings"), [
    ("llama", {}), ("llama", {"params_dtype": torch.bfloat16, "masters": "fp32_param"}), ("tied", {"masters": ""}),
    ("qwen3", {"layout": divide_layers}), ("qwen2", {"prefix": "module."}), ("gpt2", {})])
def test_megatron_core(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = foreign_states(tmp_path / "hf", MODELS[name])
    megatron_checkpoint(tmp_path / "run" / "iter_0000006", theirs, MODELS[name], **settings)
    source = find_source(tmp_path / "run", step=None, config=None)
    assert source is not None
    run = source.read()
    check_equal(run, theirs)
    assert (run.step, run.optimizer_step, run.consumed_samples) == (6, 6, 48)
    assert (run.seq_length, run.global_batch_size) == (64, 8)
    assert run.precision == ("bf16" if "params_dtype" in settings else "fp32")
    assert run.schedule == {"type": "cosine", "peak_rate": 1e-3, "next_rate": 5e-4, "min_lr": 1e-4, "warmup_steps": 2,
                            "total_steps": 12, "last_step": 6, "first_rate_is_0": True}
    plan = plan_adoption(run, frozenset())
    assert (plan.decay.value, run.ds_config) == (0.1, {"gradient_clipping": 1.0})
    assert plan.config.architecture == MODELS[name]["model_type"]
    assert plan.config.tie_word_embeddings == (name in ("tied", "gpt2"))


def test_rows_that_pad_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    theirs = foreign_states(tmp_path / "hf", MODELS["llama"])
    folder = megatron_checkpoint(tmp_path / "iter_0000006", theirs, MODELS["llama"], rows=128)
    run = read(folder, MODELS["llama"])
    check_equal(run, theirs)
    assert any("32 of the 128 rows of the vocabulary pad it" in note for note in run.notes)
    assert read(folder, None).config["vocab_size"] == 128


def test_a_weight_decay_that_grows_is_a_loss(tmp_path: Path) -> None:
    folder = megatron_checkpoint(tmp_path / "iter_0000006", foreign_states(tmp_path / "hf", MODELS["llama"]),
                                 MODELS["llama"])
    content = common(MODELS["llama"])
    content["opt_param_scheduler"] |= {"start_wd": 0.01, "end_wd": 0.1}
    torch.save(content, folder / "common.pt")
    assert "weight_decay (it changes from 0.01 to 0.1" in rejection(
        lambda: plan_adoption(read(folder, None), frozenset()))


def buckets(tensors: dict[str, torch.Tensor]) -> None:
    remove_optimizer(tensors)
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32).bucket_idx_0"
    tensors[f"{bucket}.exp_avg"] = torch.zeros(9)


@pytest.mark.parametrize(("settings", "expected"), [
    ({"change": buckets}, "optimizer (its states are in buckets without names, as in the format dp_reshardable"),
    ({"change": buckets, "params_dtype": torch.bfloat16}, "master_weights (its states are in buckets"),
    ({"change": lambda tensors: tensors.update({"decoder.layers.mlp.router.weight": torch.zeros(2, 3)})},
     "decoder.layers.mlp.router.weight: the checkpoint has this parameter"),
    ({"change": lambda tensors: tensors.update({"optimizer.state.exp_avg.output_layer.weight": torch.zeros(2, 3)})},
     "optimizer.state.exp_avg.output_layer.weight: found the shape [2, 3]; expected [96, 32], as of the weight"),
    ({"num_experts": 8}, "common.pt: args: num_experts is 8"), ({"rotary_percent": 0.5}, "rotary_percent 0.5"),
    ({"num_layers": 3}, "for each of 3 layers"),
    ({"hidden_size": None}, "args: hidden_size: found None; expected a number above 0")])
def test_megatron_core_checkpoints_that_are_not_understood(settings: dict[str, Any], expected: str,
                                                           tmp_path: Path) -> None:
    theirs = foreign_states(tmp_path / "hf", MODELS["llama"])
    folder = megatron_checkpoint(tmp_path / "iter_0000006", theirs, MODELS["llama"], **settings)
    assert expected in rejection(lambda: plan_adoption(read(folder, None), frozenset()))
