"""Checkpoints of torch.distributed.checkpoint: chunks, damage, hostile pickles; torchtitan's and Megatron Core's names.

Their losses after a resume are in tests/distributed/test_adopt.py.
"""

import argparse
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from pretrain.checkpoint.adopt.adopt import plan_adoption
from pretrain.checkpoint.adopt.dcp import read
from pretrain.checkpoint.adopt.dcp.files import read_dcp
from pretrain.checkpoint.adopt.foreign_run import ForeignRun, with_sample_length
from pretrain.checkpoint.adopt.sources import find_source
from pretrain.errors import ConfigError
from tests.support.dcp_writer import DcpWriter, write_dcp
from tests.support.foreign import STATES, foreign_states
from tests.support.poison import Poison

transformers.logging.set_verbosity_error()
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
         "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "rope_theta": 10000.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama"}, "qwen3": {**SIZES, "model_type": "qwen3"},
    "tied": {**SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {key: value for key, value in SIZES.items() if key != "head_dim"} | {"model_type": "qwen2"},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "n_inner": 128, "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0}}
Tensors = dict[str, dict[str, torch.Tensor]]  # state -> name -> tensor


def message(call: Callable[[], Any]) -> str:
    """Return the one line with which a call is rejected."""
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the format


def test_chunks_of_ranks_in_several_dimensions_are_joined(tmp_path: Path) -> None:
    tensors = {"rows": torch.randn(5, 4), "grid": torch.randn(5, 7, 3), "few": torch.randn(1, 4).bfloat16(),
               "number": torch.tensor(6.0), "vector": torch.arange(9), "empty": torch.zeros(0, 3)}
    writer = DcpWriter(tmp_path / "a")
    for name, splits in {"rows": (3,), "grid": (2, 3), "few": (3,), "number": (), "vector": (4,), "empty": ()}.items():
        writer.add(name, tensors[name], *splits)
    writer.add_value("step", 7)
    files = read_dcp(writer.finish())
    for name, tensor in tensors.items():
        found = files.read(name)
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name
    assert torch.equal(files.read("grid", 4), tensors["grid"][4])
    assert files.value("step") == 7
    assert {path.name for path in files.files} == {".metadata", *(f"__{rank}_0.distcp" for rank in range(6))}


def test_files_of_this_torch_are_read(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(4, 3), "optimizer": {"state.a.weight.step": torch.tensor(3.0),
                                                          "param_groups.a.weight.betas": (0.9, 0.95)}}
    dcp.save(state, checkpoint_id=tmp_path / "step-3")
    files = read_dcp(tmp_path / "step-3")
    assert torch.equal(files.read("a.weight"), state["a.weight"])
    assert files.value("optimizer.param_groups.a.weight.betas") == (0.9, 0.95)


def damaged(folder: Path, how: str) -> Path:
    writer = DcpWriter(folder)
    writer.add("weight", torch.randn(6, 4), 2, 2)
    writer.add_value("step", 7)
    chunks = writer.entries["weight"].chunks
    index, place = next(iter(writer.places.items()))
    second = folder / "__1_0.distcp"
    if how == "gap":
        chunks.pop()
    elif how == "overlap":
        chunks[1].sizes = torch.Size((3, 4))
        chunks[1].offsets = torch.Size((0, 0))
    elif how == "outside":
        chunks[3].offsets = torch.Size((4, 2))
    elif how == "other folder":
        place.relative_path = "../weights.distcp"
    elif how == "compressed":
        place.transform_descriptors = ["zstd"]
    elif how == "dtype":
        writer.entries["weight"].properties.dtype = torch.float16
    elif how == "short chunk":
        place.length = 10
    elif how == "not there":
        del writer.places[index]
    writer.finish()
    if how == "truncated":
        second.write_bytes(second.read_bytes()[:-7])
    elif how == "missing":
        second.unlink()
    elif how == "safetensors":
        second.write_bytes(b"\x08" + second.read_bytes()[1:])
    elif how == "zeros":
        content = second.read_bytes()
        second.write_bytes(content[:200] + bytes(len(content) - 200))
    elif how == "metadata":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-50])
    elif how == "another object":
        (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    return folder


@pytest.mark.parametrize(("how", "expected"), [
    ("gap", "weight: its chunks leave a gap in a tensor of [6, 4]"), ("overlap", "weight: its chunks"),
    ("outside", "a chunk of weight that ends at"), ("other folder", "the file ../weights.distcp"),
    ("compressed", "weight: its chunks are transformed by ['zstd'], which this program does not read"),
    ("dtype", "torch.float32"), ("short chunk", "found 10 bytes for a chunk; expected at least 24"),
    ("not there", "KeyError"), ("truncated", "__1_0.distcp: found "),
    ("missing", "this file of the checkpoint is missing"),
    ("safetensors", "weight: it is not in the format of torch.save"),
    ("zeros", "__1_0.distcp: weight: found an unreadable"),
    ("metadata", ".metadata: it is damaged"), ("another object", ".metadata: it is not a description of a checkpoint")])
def test_damage_is_reported_in_one_line(how: str, expected: str, tmp_path: Path) -> None:
    folder = damaged(tmp_path / "a", how)
    assert expected in message(lambda: read_dcp(folder).read("weight"))


def hostile(folder: Path, where: str, canary: str) -> None:
    """Write a checkpoint of Megatron Core in which one pickle creates the file `canary`."""
    content, writer = io.BytesIO(), DcpWriter(folder)
    torch.save(Poison(canary), content)
    writer.add("embedding.word_embeddings.weight", torch.zeros(2, 2) if where == "chunk" else torch.zeros(96, 32))
    if where == "chunk":
        next(iter(writer.places.values())).length = len(content.getvalue())
    if where == "value":
        writer.add_value("embedding.step", Poison(canary))
    writer.finish()
    torch.save({"args": argparse.Namespace(num_layers=Poison(canary) if where == "common.pt" else 2)},
               folder / "common.pt")
    if where == ".metadata":
        (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Poison(canary)}))
    elif where == "chunk":
        (folder / "__0_0.distcp").write_bytes(content.getvalue())


@pytest.mark.parametrize("where", [".metadata", "common.pt", "chunk", "value"])
def test_no_pickle_of_a_checkpoint_runs_code(where: str, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "iter_0000006"
    hostile(folder, where, str(canary))

    def read_all() -> None:
        files = read_dcp(folder)
        for name in files.tensors:
            files.read(name)
        for name in files.objects:
            files.value(name)
        read(folder, None)

    line = message(read_all)
    assert "othing in the file was run" in line, line
    assert not canary.exists()


@pytest.mark.parametrize("value", [os.system, getattr, eval, torch.nn.Linear, pickle.loads, Path.unlink])
def test_other_classes_and_functions_are_rejected(value: Any, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps([value]))
    line = message(lambda: read_dcp(tmp_path))
    assert ".metadata: " in line


# --- torchtitan


def pairs(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """Put element i of the second half of each head after element i of the first half."""
    halves = matrix.reshape(-1, 2, size // 2, *matrix.shape[1:])
    return torch.stack([halves[:, 0], halves[:, 1]], 2).reshape(matrix.shape)


def torchtitan_names(version: str) -> dict[str, str]:
    """Return the part of transformers' names -> torchtitan's."""
    attention = "attention.qkv_linear." if version == "0.3" else "attention."
    return {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "model.layers": "layers",
            "lm_head": "lm_head" if version == "0.3" else "output",
            **{f"self_attn.{part}_proj": f"{attention}w{part}" for part in "qkv"}, "self_attn.o_proj": "attention.wo",
            "self_attn.": "attention.", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
            "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm"}


def torchtitan_checkpoint(folder: Path, theirs: Tensors, model: dict[str, Any], version: str,
                          **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and other values of a checkpoint of a version of torchtitan."""
    tensors, values = {}, {"train_state.step": 6, "lr_scheduler.last_epoch": 6, "dataloader.dp_rank_0": b"state",
                           "dataloader.world_size": 2, "train_state.ntokens_seen": 6 * 4 * 64}
    if version == "0.1":
        del values["train_state.ntokens_seen"]
    for name in theirs["fp32"]:
        fqn = name
        for old, new in torchtitan_names(version).items():
            fqn = fqn.replace(old, new, 1)
        for state in theirs:
            tensor = theirs[state][name]
            if model["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
                tensor = pairs(tensor, 8)
            prefix = "model." if version == "0.1" else ""
            tensors[f"{prefix}{fqn}" if state == "fp32" else f"optimizer.state.{fqn}.{state}"] = tensor
        tensors[f"optimizer.state.{fqn}.step"] = torch.tensor(6.0)
        for key, value in {"lr": 2e-3, "initial_lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False,
                           "maximize": False, "weight_decay": 0.1, "decoupled_weight_decay": True, **changes}.items():
            values[f"optimizer.param_groups.{fqn}.{key}"] = value
    return tensors, values


def fuse_qkv(tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    """Give the optimizer one matrix of queries, keys and values, by key head, as torchtitan 0.3 may have it."""
    for layer in range(2):
        for state in STATES:
            begin = f"optimizer.state.layers.{layer}.attention.qkv_linear."
            parts = [tensors.pop(f"{begin}w{part}.weight.{state}").view(2, -1, 8, 32) for part in "qkv"]
            tensors[f"{begin}wqkv.weight.{state}"] = torch.cat(parts, 1).reshape(-1, 32)
        for part in "qkv":
            tensors.pop(f"{begin}w{part}.weight.step")
        tensors[f"{begin}wqkv.weight.step"] = torch.tensor(6.0)
        for key in [key for key in values if f"layers.{layer}.attention.qkv_linear" in key]:
            values[key.replace("wq.", "wqkv.")] = values.pop(key)


def is_equal(run: ForeignRun, theirs: Tensors, states: tuple[str, ...] = ("fp32", *STATES)) -> None:
    """Compare all tensors of a run with those of transformers' model."""
    assert run.shapes == {name: tuple(tensor.shape) for name, tensor in theirs["fp32"].items()}
    for state in states:
        for name, tensor in theirs[state].items():
            assert torch.equal(run.read(name, state), tensor), (name, state)


@pytest.mark.parametrize(("version", "name", "fused"), [
    ("0.1", "llama", False), ("0.2", "llama", False), ("0.2", "qwen3", False), ("0.2", "tied", False),
    ("0.3", "qwen3", True), ("0.3", "llama", True)])
def test_torchtitan(version: str, name: str, fused: bool, tmp_path: Path) -> None:
    model = MODELS[name]
    theirs = foreign_states(tmp_path / "hf", model)
    tensors, values = torchtitan_checkpoint(tmp_path, theirs, model, version)
    if fused:
        fuse_qkv(tensors, values)
    if name == "tied":
        tensors["output.weight"] = tensors["tok_embeddings.weight"]
    if version == "0.1":
        angles = torch.outer(torch.arange(3.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
        tensors["model.freqs_cis"] = torch.polar(torch.ones_like(angles), angles)
    folder = write_dcp(tmp_path / "checkpoint" / "step-6", tensors, values)
    source = find_source(tmp_path / "checkpoint", step=6, config=model)
    assert source is not None
    run = source.read()
    is_equal(run, theirs)
    assert (run.step, run.optimizer_step, run.schedule, run.folder) == (
        6, 6.0, {"last_step": 6, "next_rate": 2e-3}, folder)
    assert run.optimizer == {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8,
                                                         "weight_decay": 0.1}}
    assert any("rope_theta" in note for note in run.notes) == (version != "0.1")
    assert run.consumed_tokens == (None if version == "0.1" else 3072)
    lost = "data_position (it records 3072 consumed tokens: --seq_length N makes samples of them)"
    assert (lost if version != "0.1" else "data_position") in message(lambda: plan_adoption(run, frozenset()))
    if version != "0.1":
        plan = plan_adoption(with_sample_length(run, 64), frozenset())
        assert plan.run.consumed_samples == 48
        assert plan.decay.flags == {"decay_vectors": True}
        assert "expected a divisor of 3072" in message(lambda: with_sample_length(run, 100))


def torchtitan_error(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], *,
                     config: dict[str, Any] | None = MODELS["llama"], version: str = "0.2", **changes: Any) -> str:
    theirs = foreign_states(folder / "hf", MODELS["llama"])
    tensors, values = torchtitan_checkpoint(folder, theirs, MODELS["llama"], version, **changes)
    change(tensors, values)
    return message(lambda: plan_adoption(read(write_dcp(folder / "step-6", tensors, values), config), frozenset()))


def add(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, values: (tensors if isinstance(value, torch.Tensor) else values).update({name: value})


def remove(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tensors: dict[str, Any], values: dict[str, Any]) -> None:
        del (tensors if name in tensors else values)[name]
    return change


def keep_all(tensors: dict[str, Any], values: dict[str, Any]) -> None:
    pass


def without_optimizer(tensors: dict[str, Any], values: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        del tensors[name]


@pytest.mark.parametrize(("change", "settings", "expected"), [
    (keep_all, {"config": None}, "a checkpoint of torchtitan does not describe its model"),
    (keep_all, {"config": MODELS["gpt2"]}, "--model: found model_type gpt2; expected llama or qwen3"),
    (keep_all, {"config": {**MODELS["llama"], "num_key_value_heads": 4}}, "k_proj.weight: found the shape [16, 32]"),
    (keep_all, {"config": {**MODELS["llama"], "num_hidden_layers": 3}}, "the checkpoint does not"),
    (keep_all, {"config": MODELS["tied"]}, "--model: tie_word_embeddings: it is true, and output.weight"),
    (keep_all, {"amsgrad": True}, "without amsgrad and maximize"),
    (add("layers.0.moe.experts.w1", torch.zeros(4, 2)), {}, "layers.0.moe.experts.w1: this program does not know"),
    (add("tokenizer", 3), {}, "tokenizer: this program does not know"),
    (add("optimizer.state.norm.weight.momentum", torch.zeros(32)), {}, "optimizer (its states are exp_avg, exp_avg_sq"),
    (add("optimizer.state.norm.weight.step", torch.tensor(5.0)), {}, "optimizer.state: found the steps [5.0, 6.0]"),
    (add("optimizer.param_groups.norm.weight.betas", (0.9, 0.9)), {}, "an Adam with the same betas and eps"),
    (remove("optimizer.state.norm.weight.exp_avg"), {}, "norm.weight.exp_avg: the optimizer state is missing"),
    (remove("train_state.step"), {}, "train_state.step: found None"),
    (without_optimizer, {}, "optimizer (the checkpoint has weights alone)"),
    (add("model.freqs_cis", torch.polar(torch.ones(3, 4), torch.ones(3, 4))), {"version": "0.1"},
     "freqs_cis: found rotary frequencies from 1 to 1; expected 1 to 0.001")])
def test_torchtitan_checkpoints_that_are_not_understood(change: Any, settings: dict[str, Any], expected: str,
                                                        tmp_path: Path) -> None:
    assert expected in torchtitan_error(tmp_path, change, **settings)


# --- Megatron Core


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
    is_equal(run, theirs)
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
    is_equal(run, theirs)
    assert any("32 of the 128 rows of the vocabulary pad it" in note for note in run.notes)
    assert read(folder, None).config["vocab_size"] == 128


def test_a_weight_decay_that_grows_is_a_loss(tmp_path: Path) -> None:
    folder = megatron_checkpoint(tmp_path / "iter_0000006", foreign_states(tmp_path / "hf", MODELS["llama"]),
                                 MODELS["llama"])
    content = common(MODELS["llama"])
    content["opt_param_scheduler"] |= {"start_wd": 0.01, "end_wd": 0.1}
    torch.save(content, folder / "common.pt")
    assert "weight_decay (it changes from 0.01 to 0.1" in message(
        lambda: plan_adoption(read(folder, None), frozenset()))


def buckets(tensors: dict[str, torch.Tensor]) -> None:
    without_optimizer(tensors, {})
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
    assert expected in message(lambda: plan_adoption(read(folder, None), frozenset()))


def test_names_of_other_programs_are_rejected(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "step-1", {"encoder.weight": torch.zeros(3)}, {})
    assert "found tensors with names such as encoder.weight; expected names of torchtitan" in message(
        lambda: read(folder, None))
    shards = tmp_path / "other/step-2"
    shards.mkdir(parents=True)
    (shards / "shard-00001-model-00001-of-00001.safetensors").touch()
    for path in (shards, shards.parent):
        assert f"{shards}: shards that torch's HuggingFaceStorageWriter wrote are not read" in message(
            lambda path=path: find_source(path, step=None, config=None))
