"""Compare tensors, record what autograd saves, and convert weights of transformers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pretrain.model.description import ModelConfig
from pretrain.model.hf_names import name_in_module, stacked_in_module, tensor_rules
from pretrain.model.hf_weights import to_ours


def relative_error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    """Return |mine - exact| / |exact|, with the Frobenius norm."""
    return ((mine.double() - exact.double()).norm() / exact.double().norm()).item()


def saved_by(compute: Callable[..., torch.Tensor], *arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the result of `compute`, and the tensors that autograd saves for its backward pass."""
    compute(*arguments)  # the first call in a process may try implementations, which save tensors
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return compute(*arguments), saved


def from_transformers(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the state_dict of our module for a transformers model's: the inverse of `to_transformers`."""
    result: dict[str, torch.Tensor] = {}
    for rule in tensor_rules(config):
        if rule.is_stacked:
            name, is_second = stacked_in_module(rule.theirs[0])
            first = rule.shape[1] if is_second else 0
            result[rule.ours] = state[name].narrow(1, first, rule.shape[1])
        else:
            result[rule.ours] = to_ours(rule, [state[name_in_module(name, config)] for name in rule.theirs], config)
    return result
