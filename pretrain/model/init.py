"""Initial weights: a function of (seed, parameter name) only, so that every layout starts with the same weights."""

import math
import zlib

import torch
from torch import nn

from pretrain.model.description import ModelConfig
from pretrain.model.init_methods import Initialization, initial_std, is_uniform
from pretrain.model.parameters import part_of

FROM_CONFIG = Initialization()


def initial_value(name: str, shape: torch.Size, config: ModelConfig, *, seed: int,
                  how: Initialization = FROM_CONFIG) -> torch.Tensor:
    """Return an fp32 tensor on the CPU: 0 for biases, random values for matrices; norms start as multiplication by 1.

    The values of a matrix have the standard deviation of `initial_std` and the mean 0.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.full(shape, 1.0 - config.norm_offset)
    std = initial_std(name, shape, config, how)
    # a 32-bit checksum, because torch's CPU generator ignores the higher bits of a seed
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if is_uniform(name, how):
        bound = math.sqrt(3) * std
        return values.uniform_(-bound, bound, generator=generator)
    return values.normal_(0.0, std, generator=generator)


def initialize_parameters(module: nn.Module, config: ModelConfig, *, seed: int,
                          how: Initialization = FROM_CONFIG) -> None:
    """Fill the parameters of a plain module, of this rank's pipeline stage, or of a module under `zero.Init`, in place.

    Under ZeRO-3 the call is collective, and the first rank of each partition group computes the values.
    """
    config.implementation.initialize(module, config, seed=seed, how=how)


def initialize_family(module: nn.Module, config: ModelConfig, *, seed: int, how: Initialization) -> None:
    """Do this for a model of families/."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            _fill_partitioned(name, parameter, config, seed, how)
        else:
            with torch.no_grad():
                parameter.copy_(_own_values(name, parameter, config, seed, how))


def _own_values(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int,
                how: Initialization) -> torch.Tensor:
    """Return the initial values of what this rank holds: its part of the complete parameter's values."""
    part = part_of(parameter)
    if part is None:
        return initial_value(name, parameter.shape, config, seed=seed, how=how)
    return part.of(initial_value(name, torch.Size(part.shape), config, seed=seed, how=how))


def _fill_partitioned(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int,
                      how: Initialization) -> None:
    import deepspeed

    # one at a time, so that no rank holds more than one complete parameter
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if deepspeed.comm.get_rank(parameter.ds_process_group) == 0:  # type: ignore[attr-defined]
            parameter.copy_(_own_values(name, parameter, config, seed, how))
