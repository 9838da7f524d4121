"""A decoder of a user's own code, and the same with faults that the parts of the model or the proof must find."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class FaultyConfig(PreTrainedConfig):
    """`fault`: "" or what is wrong with the model."""

    model_type = "faulty_decoder"

    def __init__(self, vocab_size: int = 200, hidden_size: int = 256, num_hidden_layers: int = 6, fault: str = "",
                 **kwargs: Any) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.fault = fault
        super().__init__(**kwargs)


class FaultyLayer(nn.Module):
    """Adds to each position a function of the mean of the positions up to it."""

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__()
        self.fault = config.fault
        self.mix, self.scale = nn.Linear(config.hidden_size, config.hidden_size), nn.Parameter(
            torch.full((config.hidden_size,), 0.5))

    def forward(self, hidden: torch.Tensor, counts: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        means = hidden.cumsum(1) / counts
        if self.fault == "sees later tokens":
            means = means + hidden.mean(1, keepdim=True)
        if self.fault == "is random":
            means = means + torch.randn_like(means)
        return hidden + torch.tanh(self.mix(means)) * self.scale * (1.0 if factor is None else factor)


class FaultyModel(PreTrainedModel):
    config_class = FaultyConfig
    _supports_sdpa = True

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FaultyLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> CausalLMOutput:
        fault, hidden = self.config.fault, self.embedding(input_ids)
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        embedded = hidden
        for index, layer in enumerate(self.layers):
            if fault == "factor" and index:
                hidden = layer(hidden, counts, factor=1 + hidden.mean(-1, keepdim=True))
            elif fault == "no gradient" and index == 0:
                with torch.no_grad():
                    hidden = layer(hidden, counts)
            else:
                hidden = layer(hidden, counts)
            if fault == "between":
                hidden = hidden + 0.1 * embedded
            if fault == "between, in place" and index == 1:
                hidden.add_(0.5)
            if fault == "detach" and index == 0:
                hidden.detach_()
            if fault == "twice" and index == 1:
                hidden = layer(hidden, counts)
        logits = self.head(self.norm(hidden))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss = loss * 2 if fault == "other loss" else loss
        return CausalLMOutput(loss=loss, logits=logits)


def crash(model_type: str) -> Any:
    """Take the place of a proof, and end the process."""
    import os

    os._exit(3)


def hang(model_type: str) -> Any:
    """Take the place of a proof that does not end."""
    import time

    time.sleep(600)
