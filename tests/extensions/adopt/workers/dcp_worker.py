"""A small Llama whose parameters have the names and the rotary pairs of torchtitan's, or the names of Megatron Core's.

Program `dcp_worker.py CASES.json RESULTS.json`: one rank, which trains each case with torch alone: FSDP2, AdamW,
torch.distributed.checkpoint. Cases and results are those of other_programs.py, with the programs "torchtitan" and
"megatron_core". The checkpoint of step `save_at` is in the folder NAME/step-N or NAME/iter_N.
"""

import argparse
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

Case = dict[str, Any]
MICRO, RATE, DECAY = 2, 1e-2, 0.1


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Attention with grouped queries, which rotates neighbouring elements of a head (torchtitan's Llama 3)."""

    def __init__(self, config: Case) -> None:
        super().__init__()
        width, self.size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
        keys = config["num_key_value_heads"] * self.size
        self.wq, self.wk, self.wv, self.wo = linear(width, width), linear(width, keys), linear(width, keys), \
            linear(width, width)
        self.theta = config.get("rope_theta", 10000.0)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate [batch, head, position, element]."""
        frequencies = self.theta ** (-torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), frequencies)
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (matrix(x).view(batch, length, -1, self.size).transpose(1, 2)
                   for matrix in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True,
                                                        enable_gqa=True)
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, config: Case) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.w1, self.w2, self.w3 = linear(width, inner), linear(inner, width), linear(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, config: Case) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm = nn.RMSNorm(config["hidden_size"], eps=1e-6)
        self.ffn_norm = nn.RMSNorm(config["hidden_size"], eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Llama with torchtitan's names."""

    def __init__(self, config: Case) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleDict({str(number): Block(config) for number in range(config["num_hidden_layers"])})
        self.norm = nn.RMSNorm(config["hidden_size"], eps=1e-6)
        self.output = linear(config["hidden_size"], config["vocab_size"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        out: torch.Tensor = self.output(self.norm(x))
        return out


def build(case: Case) -> tuple[Llama, torch.optim.AdamW]:
    """Return the model, divided among the ranks by FSDP2, and its optimizer."""
    torch.manual_seed(3)
    model = Llama(case["model"])
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    half = case.get("precision") == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else \
        MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    vectors = DECAY if case["program"] == "torchtitan" else 0.0  # Megatron decays matrices alone
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": vectors}]
    return model, torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY, foreach=False)


def train(case: Case) -> list[float]:
    """Train, save, and return the losses."""
    model, optimizer = build(case)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rows = torch.from_numpy(np.load(case["samples"]).astype(np.int64))
    rank, ranks, position, losses = dist.get_rank(), dist.get_world_size(), 0, []
    accumulated = case["batch"] // (MICRO * ranks)
    for step in range(1, case["steps"] + 1):
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(accumulated):
            micro = rows[position + rank * MICRO:position + (rank + 1) * MICRO]
            loss = functional.cross_entropy(model(micro[:, :-1]).float().flatten(0, 1), micro[:, 1:].flatten())
            (loss / accumulated).backward()
            total += loss.detach().double() / accumulated
            position += ranks * MICRO
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        if step == case["save_at"]:
            SAVERS[case["program"]](case, model, optimizer, schedule, step)
    return losses


def optimizer_values(model: Llama, optimizer: torch.optim.Optimizer) -> Case:
    """Return states and settings of the optimizer under the names of the parameters, flat."""
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def save_torchtitan(case: Case, model: Llama, optimizer: torch.optim.Optimizer, schedule: Any, step: int) -> None:
    """Save with the keys of torchtitan 0.2 (torchtitan/components/checkpoint.py)."""
    tokens = step * case["batch"] * case["seq_length"] // dist.get_world_size()
    data = {f"dp_rank_{dist.get_rank()}": pickle.dumps({"sample": step}), "world_size": dist.get_world_size()}
    state = {**model.state_dict(), "optimizer": optimizer_values(model, optimizer),
             "lr_scheduler": schedule.state_dict(), "dataloader": data,
             "train_state": {"step": step, "ntokens_seen": tokens}}
    dcp.save(state, checkpoint_id=f"{case['name']}/step-{step}")


def save_megatron_core(case: Case, model: Llama, optimizer: torch.optim.Optimizer, schedule: Any, step: int) -> None:
    """Save with the keys of Megatron Core's torch_dist in its format fully_reshardable, divided as 2 TP ranks do."""
    config, values = case["model"], optimizer_values(model, optimizer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {"param": {name: full(value) for name, value in model.state_dict().items()}}
    whole |= {state: {name: full(values[f"state.{name}.{state}"]) for name in whole["param"]}
              for state in ("exp_avg", "exp_avg_sq")}
    dtype = torch.bfloat16 if case.get("precision") == "bf16" else torch.float32
    state: Case = {}
    for kind, tensors in whole.items():
        for key, tensor, dim in megatron_tensors(tensors, config):
            placed = [Replicate()] if dim is None else [Shard(dim)]
            state[f"optimizer.state.{kind}.{key}"] = distribute_tensor(tensor, mesh, placed)
            if kind == "param":
                state[key] = distribute_tensor(tensor.to(dtype), mesh, placed)
    folder = Path(case["name"]) / f"iter_{step:07d}"
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(megatron_common(case, step), folder / "common.pt")
    dist.barrier()


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def megatron_tensors(tensors: dict[str, torch.Tensor], config: Case) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """Yield key, tensor, and the dimension that tensor-parallel ranks divide."""
    layers = range(config["num_hidden_layers"])
    size, groups = config["hidden_size"] // config["num_attention_heads"], config["num_key_value_heads"]

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([tensors[f"layers.{layer}.{name}.weight"] for layer in layers])

    def halves(matrix: torch.Tensor) -> torch.Tensor:
        """Put the even elements of each head before the odd ones: Megatron Core pairs the halves of a head."""
        return matrix.view(len(layers), -1, size // 2, 2, matrix.shape[-1]).transpose(2, 3).reshape(matrix.shape)

    by_group = [matrix.view(len(layers), groups, -1, matrix.shape[-1]) for matrix in
                (halves(stacked("attention.wq")), halves(stacked("attention.wk")), stacked("attention.wv"))]
    yield "embedding.word_embeddings.weight", tensors["tok_embeddings.weight"], 0
    yield "output_layer.weight", tensors["output.weight"], 0
    yield "decoder.final_layernorm.weight", tensors["norm.weight"], None
    yield "decoder.layers.self_attention.linear_qkv.weight", torch.cat(by_group, 2).flatten(1, 2), 1
    yield "decoder.layers.self_attention.linear_qkv.layer_norm_weight", stacked("attention_norm"), None
    yield "decoder.layers.self_attention.linear_proj.weight", stacked("attention.wo"), 2
    gated = torch.cat([stacked("feed_forward.w1"), stacked("feed_forward.w3")], 1)
    yield "decoder.layers.mlp.linear_fc1.weight", gated, 1
    yield "decoder.layers.mlp.linear_fc1.layer_norm_weight", stacked("ffn_norm"), None
    yield "decoder.layers.mlp.linear_fc2.weight", stacked("feed_forward.w2"), 2


def megatron_common(case: Case, step: int) -> Case:
    """Return the content of common.pt."""
    config, batch = case["model"], case["batch"]
    args = argparse.Namespace(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], swiglu=True, normalization="RMSNorm",
        num_attention_heads=config["num_attention_heads"], group_query_attention=True, norm_epsilon=1e-6,
        num_query_groups=config["num_key_value_heads"], ffn_hidden_size=config["intermediate_size"],
        position_embedding_type="rope", rotary_base=10000, add_bias_linear=False,
        max_position_embeddings=config["max_position_embeddings"], untie_embeddings_and_output_weights=True,
        seq_length=case["seq_length"], global_batch_size=batch, consumed_train_samples=step * batch, optimizer="adam",
        seed=3, tensor_model_parallel_size=2, pipeline_model_parallel_size=1, params_dtype=torch.float32)
    group = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "step": float(step)}
    return {"args": args, "checkpoint_version": 3.0, "iteration": step, "opt_param_scheduler": {
                "max_lr": RATE, "lr_warmup_steps": 0, "num_steps": step * batch, "lr_decay_style": "constant",
                "lr_decay_steps": case["steps"] * batch, "min_lr": 0.0},
            "optimizer": {"optimizer": {"param_groups": [{**group, "weight_decay": decay} for decay in (DECAY, 0.0)]},
                          "param_state_sharding_type": "fully_reshardable"}}


SAVERS = {"torchtitan": save_torchtitan, "megatron_core": save_megatron_core}


def main() -> None:
    dist.init_process_group("gloo")
    results = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        results[case["name"]] = train(case)
        if dist.get_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
