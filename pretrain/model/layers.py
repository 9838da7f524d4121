"""Layers of the model: tensors in, tensors out, independent of pipelines and ZeRO.

Shapes: B batch, T positions, D hidden size, H query heads, K key/value heads, E elements per head, F inner size of the
MLP, V vocabulary.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn

from pretrain.model.config import ModelConfig
from pretrain.model.kernels.activation import activated_linear, plain_activated_linear
from pretrain.model.kernels.cpu_attention import causal_attention
from pretrain.model.kernels.fused_loss import carry
from pretrain.model.loss import Labels, linear_cross_entropy
from pretrain.model.rope import Rope


class Linear(nn.Linear):
    """Linear layer without torch's initialization: initialize_parameters or a checkpoint fills it."""

    def reset_parameters(self) -> None:
        pass


class OutputLinear(Linear):
    """Output matrix [V, D] of a model without tied embeddings."""

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """Return the logits [B, T, V], or with labels the loss."""
        return F.linear(x_BTD, self.weight) if labels is None else linear_cross_entropy(x_BTD, self.weight, labels)


class TokenEmbedding(nn.Module):
    """One matrix [V, D] that maps tokens to hidden states and, if tied, hidden states to logits or loss.

    All uses go through `forward`, because ZeRO-3 gathers a partitioned weight when its module is called.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        # with learned positions, PositionEmbedding applies the dropout
        self.dropout = nn.Dropout(config.embedding_dropout if config.position != "learned" else 0.0)

    def forward(self, x: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        """Map int [B, T] to [B, T, D], and floating [B, T, D] to logits [B, T, V], or with labels to the loss."""
        if labels is not None:
            return linear_cross_entropy(x, self.embedding, labels)
        if x.is_floating_point():
            return F.linear(x, self.embedding)
        return self.dropout(F.embedding(x, self.embedding))


class PositionEmbedding(nn.Module):
    """Add learned positions, then apply the dropout of the embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.max_positions, config.hidden_size))
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.dropout(x_BTD + self.embedding[: x_BTD.shape[1]])


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` are all query heads, then all key heads, then all value heads."""

    def __init__(self, config: ModelConfig, rope: Rope | None, *, plain_operators: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.dropout, self.plain_operators = config.attention_dropout, plain_operators
        self.rope = rope
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
        self.qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.out = Linear(config.num_heads * config.head_size, config.hidden_size, bias=config.attention_out_bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, length, -1, self.head_size).split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in heads)
        if self.rope is not None:
            q_BHTE, k_BKTE = self.rope.rotate(q_BHTE), self.rope.rotate(k_BKTE)
        y_BHTE = causal_attention(q_BHTE, k_BKTE, v_BKTE, dropout=self.dropout if self.training else 0.0,
                                  plain=self.plain_operators)
        return self.out(y_BHTE.transpose(1, 2).reshape(batch, length, -1))


class ActivatedLinear(Linear):
    """Activation function followed by a linear layer."""

    def __init__(self, config: ModelConfig, *, plain_operators: bool) -> None:
        super().__init__(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation, self.plain_operators = config.activation, plain_operators

    def forward(self, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None = None) -> torch.Tensor:
        operator = plain_activated_linear if self.plain_operators else activated_linear
        return operator(self.activation, up_BTF, gate_BTF, self.weight, self.bias)


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, plain_operators: bool = False) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate = Linear(hidden, inner, bias=bias) if config.gated_mlp else None
        self.up = Linear(hidden, inner, bias=bias)
        self.down = ActivatedLinear(config, plain_operators=plain_operators)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate_BTF = None if self.gate is None else self.gate(x_BTD)
        output: torch.Tensor = self.down(self.up(x_BTD), gate_BTF)
        return output


def build_norm(config: ModelConfig) -> nn.Module:
    """Return a LayerNorm or RMSNorm over D."""
    norm = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps)


class Block(nn.Module):
    """Attention and MLP with residual connections: one after the other, or both from the same input.

    Args:
        rope: shared by all blocks; None with learned positions.
        plain_operators: use torch's operators instead of the custom kernels.
    """

    def __init__(self, config: ModelConfig, rope: Rope | None, *, plain_operators: bool = False) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.norm1 = build_norm(config)
        self.attention = Attention(config, rope, plain_operators=plain_operators)
        self.norm2 = build_norm(config)
        self.mlp = MLP(config, plain_operators=plain_operators)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        after_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        mlp_input_BTD = x_BTD if self.parallel else after_BTD
        return after_BTD + self.dropout(self.mlp(self.norm2(mlp_input_BTD)))


class FinalNorm(nn.Module):
    """Norm before the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = build_norm(config)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.norm(x_BTD)


class Head(nn.Module):
    """Head of a model without tied embeddings: logits [B, T, V], or with labels the loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.lm_head = OutputLinear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        output: torch.Tensor = self.lm_head(x_BTD, labels)
        return output


class LossHead(Head):
    """Last layer of a pipeline. Without labels it returns its input; the loss function calls it again with labels."""

    def forward(self, x_BTD: torch.Tensor, labels: Labels | None = None) -> torch.Tensor:
        return carry(x_BTD, self.lm_head.weight) if labels is None else super().forward(x_BTD, labels)
