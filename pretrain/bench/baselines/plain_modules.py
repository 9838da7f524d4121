"""GPT-2 and Llama as plain torch modules, in the style of nanoGPT: what a team writes that uses no framework.

Shapes: B batch, T positions, D hidden size, H query heads, K key/value heads, E elements per head, V vocabulary.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn

from pretrain.bench.baselines.operator_times import named_optimizer_step, operator_times
from pretrain.bench.baselines.peers import micro_batches, parameter_count
from pretrain.bench.processes.baseline_job import LEARNING_RATE, BaselineJob
from pretrain.bench.processes.request_loop import RequestLoop
from pretrain.config.validate import Plan
from pretrain.engine.parameter_groups import parameter_groups
from pretrain.model.config import ModelConfig
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from pretrain.model.layers.rope import inverse_frequencies


def plain_loop(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train the plain modules: fp32 weights, autocast, gradient clipping, torch's fused AdamW."""
    step = _build(job, requests)
    while True:
        requests.after_step(step())


def plain_profile(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Profile the steps of `plain_loop`."""
    plan, step = job.plan(), _build(job, requests)
    while True:
        requests.end_repetition(operators=operator_times(
            step, steps=requests.request["steps"], vocab_size=plan.model.vocab_size, cuda=job.device_kind == "cuda"))


def _build(job: BaselineJob, requests: RequestLoop) -> Callable[[], torch.Tensor]:
    """Return a function that does one training step, and returns its loss."""
    plan = job.plan()
    device = torch.device("cuda" if job.device_kind == "cuda" else "cpu")
    model = plain_model(plan).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters()), lr=LEARNING_RATE, betas=(0.9, 0.95),
                                  eps=1e-8, weight_decay=0.1, fused=True)
    batches, is_bf16 = micro_batches(plan, device), plan.layout.precision == "bf16"
    if job.options.get("compiled"):
        model.compile()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    named_update = named_optimizer_step(update)

    def step() -> torch.Tensor:
        tokens_BT, labels_BT = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            loss: torch.Tensor = model(tokens_BT, labels_BT)
        loss.backward()
        named_update()
        return loss

    requests.report_build(parameter_count(model))
    return step


def plain_model(plan: Plan) -> "PlainModel":
    """Return the plain modules in training mode, with this project's initial weights. Raises ValueError."""
    model, ours = PlainModel(plan.model), as_module(plan.model)
    initialize_parameters(ours, plan.model, seed=plan.args.seed)
    with torch.no_grad():  # both list their parameters in the same order
        for (name, mine), (_, theirs) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
            if mine.shape != theirs.shape:
                raise ValueError(f"plain modules: {name} has the shape {tuple(mine.shape)}, not {tuple(theirs.shape)}")
            mine.copy_(theirs)
    return model.train()


class PlainModel(nn.Module):
    """Embeddings, blocks, final norm, and the loss over all logits."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.architecture not in ("gpt2", "llama") or config.residual_dropout or config.attention_dropout:
            raise ValueError("plain modules: they have no dropout, and the shapes of gpt2 and llama only")
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        else:
            angles_TE = torch.outer(torch.arange(config.max_positions).float(), inverse_frequencies(config))
            self.register_buffer("cos", angles_TE.cos(), persistent=False)
            self.register_buffer("sin", angles_TE.sin(), persistent=False)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        length = tokens_BT.shape[1]
        x_BTD, rope = self.tokens(tokens_BT), None
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[:length]
        else:
            rope = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x_BTD = block(x_BTD, rope)
        weight_VD = self.tokens.weight if self.head is None else self.head.weight
        return F.cross_entropy(F.linear(self.norm(x_BTD), weight_VD).flatten(0, 1), labels_BT.flatten())


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        hidden, inner, attended = config.hidden_size, config.intermediate_size, config.num_heads * config.head_size
        self.norm1 = _norm(config)
        self.qkv = nn.Linear(hidden, attended + 2 * config.num_kv_heads * config.head_size, bias=config.qkv_bias)
        self.out = nn.Linear(attended, hidden, bias=config.attention_out_bias)
        self.norm2 = _norm(config)
        self.gate = nn.Linear(hidden, inner, bias=config.mlp_bias) if config.gated_mlp else None
        self.up = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x_BTD = x_BTD + self._attention(self.norm1(x_BTD), rope)
        normed_BTD = self.norm2(x_BTD)
        if self.gate is None:
            return x_BTD + self.down(F.gelu(self.up(normed_BTD), approximate="tanh"))
        return x_BTD + self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))

    def _attention(self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, length, -1, self.head_size).transpose(1, 2)
        q_BHTE, k_BKTE, v_BKTE = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if rope is not None:
            q_BHTE, k_BKTE = _rotate(q_BHTE, *rope), _rotate(k_BKTE, *rope)
        if self.num_kv_heads < self.num_heads:
            k_BKTE, v_BKTE = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (k_BKTE, v_BKTE))
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True)
        return self.out(y_BHTE.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of elements i and i + E / 2 in fp32."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    return torch.cat((first * cos_TE - second * sin_TE, second * cos_TE + first * sin_TE), dim=-1).type_as(x_BHTE)


def _norm(config: ModelConfig) -> nn.Module:
    norm = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps)
