"""A user's own model: the smallest one with rotary positions that are a buffer, in the form of the page."""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class MyConfig(PreTrainedConfig):
    model_type = "my_decoder"

    def __init__(self, vocab_size: int = 258, hidden_size: int = 32, num_hidden_layers: int = 3, scale: float = 0.5,
                 initializer_range: float = 0.02, **others: object) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.scale, self.initializer_range = scale, initializer_range
        super().__init__(**others)


class MyLayer(nn.Module):
    def __init__(self, config: MyConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(torch.relu(decay @ self.mix(self.norm(hidden))))


class MyPreTrainedModel(PreTrainedModel):
    config_class = MyConfig


class MyForCausalLM(MyPreTrainedModel):
    def __init__(self, config: MyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MyLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        distance = torch.arange(input_ids.shape[1], device=input_ids.device)
        distance = distance[:, None] - distance[None]
        hidden = self.embed(input_ids)
        decay = (0.5 ** distance.clamp(min=0) * (distance >= 0)).to(hidden.dtype)  # token i sees the tokens before it
        for layer in self.layers:
            hidden = layer(hidden, decay=decay)
        return CausalLMOutput(logits=self.lm_head(self.norm(hidden)) * self.config.scale)
