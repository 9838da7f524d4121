"""Initial weights: a function of (seed, parameter name) only, so that every layout starts with the same weights."""

import math
import zlib

import torch
from torch import nn

from pretrain.model.config import ModelConfig

RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")


def initial_value(name: str, shape: torch.Size, config: ModelConfig, *, seed: int) -> torch.Tensor:
    """Return an fp32 tensor on the CPU: 0 for biases, 1 for norms, N(0, initializer_range) for matrices.

    With `config.scale_residual_init`, residual projections have a smaller standard deviation.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    std = config.initializer_range
    if config.scale_residual_init and name.endswith(RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2 * config.num_layers)
    # a 32-bit checksum, because torch's CPU generator ignores the higher bits of a seed
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)


def initialize_parameters(module: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill the parameters of a plain module, of this rank's pipeline stage, or of a module under `zero.Init`, in place.

    Under ZeRO-3 the call is collective, and rank 0 computes the values.
    """
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            _fill_partitioned(name, parameter, config, seed)
        else:
            with torch.no_grad():
                parameter.copy_(initial_value(name, parameter.shape, config, seed=seed))


def _fill_partitioned(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int) -> None:
    import deepspeed

    # one at a time, so that no rank holds more than one complete parameter
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if deepspeed.comm.get_rank() == 0:
            parameter.copy_(initial_value(name, parameter.shape, config, seed=seed))
