"""Rotary position embedding: inverse frequencies (plain, linear and llama3 scaling), rotation of queries and keys."""

import math

import torch

from pretrain.model.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the inverse frequencies, fp32 [rotary_size / 2] on the CPU, by the same operations as transformers."""
    exponents = torch.arange(0, config.rotary_size, 2, dtype=torch.float32, device="cpu") / config.rotary_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    return _llama3(frequencies, scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"],
                   scaling["original_max_position_embeddings"])


def _llama3(frequencies: torch.Tensor, factor: float, low: float, high: float, positions: int) -> torch.Tensor:
    """Divide the frequencies of long wavelengths by `factor`, keep those of short ones, interpolate in between."""
    wavelengths = 2 * math.pi / frequencies
    smooth = ((positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


class Rope:
    """Tables of cosines and sines, shared by all layers of a process.

    They are not buffers, because the engine casts buffers to bf16, which cannot represent all positions above 256.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def tables(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [length, rotary_size / 2] on the device and in the dtype of `like`, computed in fp32."""
        key = (like.device, like.dtype)
        if key not in self._tables or self._tables[key][0].shape[0] < length:
            with torch.inference_mode(False), torch.no_grad():  # inference tensors fail in backward
                angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(self._config))
                self._tables[key] = (angles.cos().to(like), angles.sin().to(like))
        cos, sin = self._tables[key]
        return cos[:length], sin[:length]

    def rotate(self, x_BHTE: torch.Tensor) -> torch.Tensor:
        """Rotate the first `rotary_size` elements of each head by position. Pairs are i and i + rotary_size / 2."""
        cos, sin = self.tables(x_BHTE.shape[2], x_BHTE)
        size = self._config.rotary_size
        first, second = x_BHTE[..., :size].chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*rotated, x_BHTE[..., size:]), dim=-1)
