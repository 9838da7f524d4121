"""Stand-ins for GPT-NeoX and Megatron-DeepSpeed: DeepSpeed's PipelineModule and engine, and its own saving code.

The programs themselves are no dependency of the tests. These layers have their parameter names, shapes, order of rows,
tensor-parallel attributes and positions in the pipeline, and compute as they do. The page megatron.md of the extension
says what was measured with the programs themselves.

Program `megatron_worker.py CASES.json RESULTS.json`: one of 4 ranks, 2 pipeline stages x 2 tensor-parallel ranks. A
case: {"name", "program" ("neox" or "megatron"), "precision", "stage" (of ZeRO), "clipping", "samples" (an .npy file),
"save_at", "steps", and sizes of the model}. It saves the checkpoint of step `save_at` in the folder NAME. The result is
the loss of each step.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import yaml
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn import functional

from tests.support.cases_loop import each_case

STAGES, RANKS = 2, 2
BATCH, MICRO = 8, 2
RATE, LOWEST, WARM_UP = 3e-3, 3e-4, 3
Case = dict[str, Any]


class Group:
    """The tensor-parallel ranks of this process."""

    group: Any = None
    rank = 0


class Copied(torch.autograd.Function):
    """The input of column-parallel layers: the gradients of all ranks are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=Group.group)
        return total


class Summed(torch.autograd.Function):
    """The output of row-parallel layers: the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=Group.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Gathered(torch.autograd.Function):
    """Logits of the vocabulary from all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous(), group=Group.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].chunk(RANKS, -1)[Group.rank].contiguous()


def parameter(*shape: int, split: bool, std: float = 0.05, ones: bool = False) -> nn.Parameter:
    """Return a parameter; parts differ between ranks, and copies do not."""
    generator = torch.Generator().manual_seed(parameter.seed * 10 + (Group.rank if split else 0))
    parameter.seed += 1
    made = nn.Parameter(torch.randn(shape, generator=generator) * std + ones)
    made.model_parallel = made.tensor_model_parallel = split
    return made


parameter.seed = 1


class Linear(nn.Module):
    """A part of a linear layer."""

    def __init__(self, inputs: int, outputs: int, *, rows: bool, bias: bool) -> None:
        super().__init__()
        self.rows = rows
        self.weight = parameter(*(outputs, inputs // RANKS) if rows else (outputs // RANKS, inputs), split=True)
        self.bias = parameter(outputs if rows else outputs // RANKS, split=not rows) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rows:
            return functional.linear(Copied.apply(x), self.weight, self.bias)
        y = Summed.apply(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """GPT-NeoX's RMSNorm, whose weight is called scale, or a LayerNorm."""

    def __init__(self, size: int, program: str) -> None:
        super().__init__()
        if program == "neox":
            self.scale = parameter(size, split=False, ones=True)
        else:
            self.weight, self.bias = parameter(size, split=False, ones=True), parameter(size, split=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "scale"):
            return (functional.rms_norm(x.float(), x.shape[-1:], eps=1e-5) * self.scale.float()).to(x.dtype)
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps=1e-5)


class Embedding(nn.Module):
    """A part of the token embedding; Megatron's has all learned positions, too."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        rows, hidden = case["rows"] // RANKS, case["hidden"]
        self.first = Group.rank * rows
        self.word_embeddings = nn.Module()
        self.word_embeddings.weight = parameter(rows, hidden, split=True)
        if case["program"] == "megatron":
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = parameter(case["positions"], hidden, split=False)

    @property
    def word_embeddings_weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local, weight = tokens - self.first, self.word_embeddings_weight
        mine = (local >= 0) & (local < len(weight))
        x = Summed.apply(functional.embedding(local.clamp(0, len(weight) - 1), weight) * mine.unsqueeze(-1))
        if hasattr(self, "position_embeddings"):
            x = x + self.position_embeddings.weight[:tokens.shape[1]]
        return x


class Block(nn.Module):
    """GPT-NeoX's block with RMSNorm, grouped queries, rotary positions and SwiGLU, or Megatron's block of GPT-2."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        hidden, inner, self.program = case["hidden"], case["inner"], case["program"]
        self.heads, self.keys, self.size = case["heads"] // RANKS, case["kv_heads"] // RANKS, hidden // case["heads"]
        neox, bias = self.program == "neox", self.program != "neox"
        rows = hidden + 2 * case["kv_heads"] * self.size
        attention, mlp = nn.Module(), nn.Module()
        self.input_layernorm = Norm(hidden, self.program)
        attention.query_key_value = Linear(hidden, rows, rows=False, bias=bias)
        attention.dense = Linear(hidden, hidden, rows=True, bias=bias)
        setattr(self, "attention" if neox else "self_attention", attention)
        self.post_attention_layernorm = Norm(hidden, self.program)
        up, down = Linear(hidden, inner * (2 if neox else 1), rows=False, bias=bias), Linear(inner, hidden, rows=True,
                                                                                            bias=bias)
        setattr(mlp, "linear1" if neox else "dense_h_to_4h", up)
        setattr(mlp, "linear2" if neox else "dense_4h_to_h", down)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = self.attention if self.program == "neox" else self.self_attention
        q, k, v = self.split(attention.query_key_value(self.input_layernorm(x)))
        if self.program == "neox":
            q, k = self.rotated(q), self.rotated(k)
        k, v = (t.repeat_interleave(self.heads // self.keys, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.size)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(future, -torch.inf).softmax(-1).to(x.dtype)
        x = x + attention.dense(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
        y = self.post_attention_layernorm(x)
        if self.program == "neox":
            up, gate = self.mlp.linear1(y).chunk(2, -1)
            return x + self.mlp.linear2(functional.silu(gate) * up)
        inner = functional.gelu(self.mlp.dense_h_to_4h(y), approximate="tanh")
        return x + self.mlp.dense_4h_to_h(inner)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [batch, tokens, heads, size]."""
        if self.program == "neox":  # grouped queries
            parts = qkv.split([self.heads * self.size, self.keys * self.size, self.keys * self.size], -1)
            q, k, v = (part.unflatten(-1, (-1, self.size)) for part in parts)
        else:
            q, k, v = qkv.unflatten(-1, (self.heads, 3 * self.size)).chunk(3, -1)
        return q, k, v

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = 10000 ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(x.shape[1]), frequencies).repeat(1, 2).unsqueeze(1)
        first, second = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(x.dtype)


class Head(nn.Module):
    """GPT-NeoX's head without tied weights."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.final_linear = Linear(case["hidden"], case["rows"], rows=False, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Gathered.apply(self.final_linear(x))


class FinalNorm(nn.Module):
    """GPT-NeoX's final norm is inside another module."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = Norm(case["hidden"], case["program"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def tied_logits(embedding: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of all ranks with the tied embedding."""
    return Gathered.apply(functional.linear(Copied.apply(x), embedding.word_embeddings_weight))


def nothing(x: torch.Tensor) -> torch.Tensor:
    """A function between layers, which counts as a layer."""
    return x


def layers_of(case: Case) -> list[Any]:
    """Return the layers in the positions of the program."""
    blocks = [LayerSpec(Block, case) for _ in range(case["layers"])]
    if case["program"] == "neox":
        return [LayerSpec(Embedding, case), nothing, *blocks, nothing, LayerSpec(FinalNorm, case),
                LayerSpec(Head, case)]
    tied = {"tied_weight_attr": "word_embeddings_weight"}
    return [nothing, TiedLayerSpec("embed", Embedding, case, **tied), *blocks,
            LayerSpec(Norm, case["hidden"], case["program"]),
            TiedLayerSpec("embed", Embedding, case, forward_fn=tied_logits, **tied)]


class Annealing:
    """A cosine schedule with the state_dict of the program's: GPT-NeoX counts steps, Megatron-DeepSpeed samples."""

    def __init__(self, optimizer: torch.optim.Optimizer, case: Case) -> None:
        self.optimizer, self.case, self.position = optimizer, case, -1
        self.step()

    def step(self, *_: Any, **__: Any) -> None:
        self.position += 1
        if self.position <= WARM_UP:
            rate = RATE * max(1, self.position) / WARM_UP
        else:
            fraction = (self.position - WARM_UP) / (self.case["steps"] - WARM_UP)
            rate = LOWEST + (RATE - LOWEST) / 2 * (1 + math.cos(math.pi * fraction))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        end = self.case["steps"]
        if self.case["program"] == "neox":
            return {"start_lr": RATE, "warmup_iter": float(WARM_UP), "num_iters": self.position,
                    "decay_style": "cosine", "end_iter": end, "min_lr": LOWEST}
        return {"max_lr": RATE, "lr_warmup_steps": WARM_UP * BATCH, "num_steps": self.position * BATCH,
                "lr_decay_style": "cosine", "lr_decay_steps": end * BATCH, "min_lr": LOWEST, "lr_warmup_tokens": None,
                "lr_decay_tokens": None, "num_tokens": 0}


def client_state(case: Case, step: int) -> dict[str, Any]:
    """Return what the program adds to the file of each mp rank."""
    if case["program"] == "neox":
        return {"iteration": step, "args": {"num_layers": case["layers"]}, "torch_rng_state": torch.get_rng_state(),
                "np_rng_state": np.random.get_state()}
    args = argparse.Namespace(
        num_layers=case["layers"], hidden_size=case["hidden"], num_attention_heads=case["heads"],
        num_key_value_heads=case["heads"], max_position_embeddings=case["positions"], seq_length=case["seq_length"],
        padded_vocab_size=case["rows"], layernorm_epsilon=1e-5, normalization="layernorm", bias_gelu_fusion=True,
        hidden_dropout=0.0, attention_dropout=0.0, consumed_train_samples=step * BATCH, global_batch_size=BATCH,
        add_position_embedding=True, optimizer="adam", seed=1234, params_dtype=torch.float32)
    return {"iteration": step, "args": args, "checkpoint_version": 3.0, "rng_state": [{"np": np.random.get_state()}]}


def save(engine: Any, case: Case, step: int) -> None:
    """Save as the program does."""
    engine.save_checkpoint(case["name"], tag=f"global_step{step}", client_state=client_state(case, step))
    if case["program"] == "neox" and dist.get_rank() == 0:
        configs = Path(case["name"]) / f"global_step{step}" / "configs"
        configs.mkdir()
        (configs / "model.yml").write_text(yaml.safe_dump({
            "num-layers": case["layers"], "hidden-size": case["hidden"], "num-attention-heads": case["heads"],
            "num_kv_heads": case["kv_heads"], "max-position-embeddings": case["positions"], "pos-emb": "rotary",
            "norm": "rmsnorm", "rms_norm_epsilon": 1e-5, "activation": "swiglu", "use_bias_in_attn_linear": False,
            "use_bias_in_mlp": False, "no-weight-tying": True}))
        (configs / "data.yml").write_text(yaml.safe_dump({
            "seq-length": case["seq_length"], "seed": 1234, "optimizer": {"type": "Adam", "params": {"lr": RATE}}}))


def train(case: Case) -> list[float]:
    """Train with a pipeline engine, and return the losses."""
    parameter.seed = 1
    topology = PipeModelDataParallelTopology(num_pp=STAGES, num_mp=RANKS, num_dp=1)
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            Group.group, Group.rank = group, ranks.index(dist.get_rank())
    module = PipelineModule(layers_of(case), topology=topology, partition_method="type:Block",
                            loss_fn=lambda logits, labels: functional.cross_entropy(logits.float().flatten(0, 1),
                                                                           labels.flatten()))
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                                   {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}],
                                  lr=RATE, betas=(0.9, 0.95))
    config: dict[str, Any] = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": case["clipping"],
        "zero_optimization": {"stage": case["stage"]}, "steps_per_print": 10**6}
    if case["precision"] == "bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config,
                                      lr_scheduler=Annealing(optimizer, case))
    rows = torch.from_numpy(np.load(case["samples"]).astype(np.int64))
    batches = iter([(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows.split(MICRO)])
    losses = []
    for step in range(1, case["steps"] + 1):
        losses.append(float(engine.train_batch(data_iter=batches)))
        if step == case["save_at"]:
            save(engine, case, step)
    engine.destroy()
    return losses


if __name__ == "__main__":
    each_case(train)
