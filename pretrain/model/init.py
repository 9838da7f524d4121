"""Initial weights: a function of (seed, parameter name), whatever the layout."""

import math
import zlib

import torch
from torch import nn

from pretrain.model.config import ModelConfig

RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")


def initial_value(name: str, shape: torch.Size, config: ModelConfig, *, seed: int) -> torch.Tensor:
    """fp32 on the CPU: biases 0, norms 1, matrices N(0, initializer_range), residual projections as config says."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    std = config.initializer_range
    if config.scale_residual_init and name.endswith(RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2 * config.num_layers)
    # one checksum of both: torch's CPU generator looks at the lowest 32 bits of a seed only
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)


def initialize_parameters(module: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill `module` in place: a plain module, this rank's pipeline stage, or one that `zero.Init` partitioned.

    Under ZeRO-3 it is collective: every rank must call it, and rank 0 computes the values.
    """
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            _fill_partitioned(name, parameter, config, seed)
        else:
            with torch.no_grad():
                parameter.copy_(initial_value(name, parameter.shape, config, seed=seed))


def _fill_partitioned(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int) -> None:
    import deepspeed

    # one at a time: no rank ever holds more than one whole parameter
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if deepspeed.comm.get_rank() == 0:
            parameter.copy_(initial_value(name, parameter.shape, config, seed=seed))
