"""Rotary position embedding: inverse frequencies, plain and scaled, and rotation of queries and keys.

The formulas of the scaling types and the order of their operations are from transformers/modeling_rope_utils.py.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from pretrain.model.description import ModelConfig
from pretrain.model.kernels.documents import Documents

Tables = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(config: ModelConfig, length: int = 0) -> torch.Tensor:
    """Return the inverse frequencies, fp32 [rotary_size / 2] on the CPU, by the same operations as transformers.

    Args:
        length: of the sequence in tokens. Only the scaling type "dynamic" depends on it, beyond max_positions.
    """
    exponents = torch.arange(0, config.rotary_size, 2, dtype=torch.float32, device="cpu") / config.rotary_size
    periods, scaling = config.rope_theta**exponents, config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "dynamic" and length > config.max_positions:
        periods = _dynamic_theta(config, scaling["factor"], length) ** exponents
    if scaling is not None and scaling["rope_type"] == "yarn":
        return _yarn(config, scaling, periods)
    frequencies = 1.0 / periods
    if scaling is None or scaling["rope_type"] == "dynamic":
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    return _llama3(frequencies, scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"],
                   scaling["original_max_position_embeddings"])


def _llama3(frequencies: torch.Tensor, factor: float, low: float, high: float, positions: int) -> torch.Tensor:
    """Divide the frequencies of long wavelengths by `factor`, keep short ones, interpolate in between."""
    wavelengths = 2 * math.pi / frequencies
    smooth = ((positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _dynamic_theta(config: ModelConfig, factor: float, length: int) -> torch.Tensor:
    """Return the larger theta, fp32, for a sequence that is longer than max_positions (NTK-aware scaling)."""
    size = config.rotary_size
    tokens = torch.tensor(length, dtype=torch.int64, device="cpu")
    return config.rope_theta * ((factor * tokens / config.max_positions) - (factor - 1)) ** (size / (size - 2))


def _yarn(config: ModelConfig, scaling: dict[str, Any], periods: torch.Tensor) -> torch.Tensor:
    """Divide the frequencies that turn seldom in the original context by `factor`, and keep those that turn often.

    Pairs between `low` and `high` are interpolated linearly (YaRN, arXiv 2309.00071, section 3.2).
    """
    size = config.rotary_size

    def pair(rotations: float) -> float:
        """Return the index, as a fraction, of the pair that makes this number of rotations in the original context."""
        positions = scaling["original_max_position_embeddings"]
        return size * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair(scaling.get("beta_fast", 32)), pair(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001  # no division by 0
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return 1.0 / (scaling["factor"] * periods) * (1 - kept) + 1.0 / periods * kept


def table_factor(config: ModelConfig) -> float:
    """Return the factor of cosines and sines, which YaRN uses to scale the attention scores; 1 for other types."""
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def logarithmic(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    above, below = scaling.get("mscale", 0), scaling.get("mscale_all_dim", 0)
    return logarithmic(above) / logarithmic(below) if above and below else logarithmic(1)


class Rope:
    """Tables of cosines and sines, shared by all layers of a process with the same frequencies.

    They are not buffers, because the engine casts buffers to bf16, which cannot represent all positions above 256.

    Args:
        local: use `local_rope_theta` without scaling: for layers with a window.
    """

    def __init__(self, config: ModelConfig, *, local: bool = False) -> None:
        self._local = local
        self._config = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None) if local else config
        self._factor = table_factor(self._config)
        self._tables: dict[tuple[torch.device, torch.dtype, int], Tables] = {}

    def tables(self, length: int, like: torch.Tensor) -> Tables:
        """Return cos and sin [length, rotary_size / 2] on the device and in the dtype of `like`, computed in fp32."""
        key = (like.device, like.dtype, self._scaled_length(length))
        if key not in self._tables or self._tables[key][0].shape[0] < length:
            with torch.inference_mode(False), torch.no_grad():  # inference tensors fail in backward
                angles = torch.outer(torch.arange(length, dtype=torch.float32),
                                     inverse_frequencies(self._config, length))
                cos, sin = angles.cos(), angles.sin()
                if self._factor != 1.0:
                    cos, sin = cos * self._factor, sin * self._factor
                self._tables[key] = (cos.to(like), sin.to(like))
        cos, sin = self._tables[key]
        return cos[:length], sin[:length]

    def _scaled_length(self, length: int) -> int:
        """Return the length on which the frequencies depend; 0 if they do not."""
        scaling = self._config.rope_scaling
        dynamic = scaling is not None and scaling["rope_type"] == "dynamic"
        return length if dynamic and length > self._config.max_positions else 0

    def document_tables(self, documents: Documents, like: torch.Tensor) -> Tables:
        """Return cos and sin [B, 1, T, rotary_size / 2] for positions inside documents, made once a micro-batch."""
        key = (self._local, like.dtype)
        if key not in documents.rope_tables:
            positions_BT = documents.positions_BT
            cos, sin = self.tables(positions_BT.shape[1], like)
            documents.rope_tables[key] = cos[positions_BT][:, None], sin[positions_BT][:, None]
        return documents.rope_tables[key]

    def tables_for(self, x_BTHE: torch.Tensor, documents: Documents | None) -> Tables:
        """Return cos and sin for queries or keys: from `tables`, or with documents from `document_tables`."""
        return self.tables(x_BTHE.shape[1], x_BTHE) if documents is None else self.document_tables(documents, x_BTHE)

    def rotate(self, x_BHTE: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Rotate the first `rotary_size` elements of each head by position. Pairs are i and i + rotary_size / 2.

        Positions begin at 0 with each sample, or with each of its `documents`.
        """
        cos, sin = self.tables_for(x_BHTE.transpose(1, 2), documents)
        size = self._config.rotary_size
        first, second = x_BHTE[..., :size].chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*rotated, x_BHTE[..., size:]), dim=-1)
