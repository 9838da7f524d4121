"""Convert weights exactly between this project's model and the model of transformers with the same config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pretrain.model.description import ModelConfig
from pretrain.model.hf_names import TensorRule, name_in_module, stacked_in_module, tensor_rules

State = dict[str, torch.Tensor]


def to_ours(rule: TensorRule, theirs: Sequence[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Return our tensor for the tensors `rule.theirs`. It may share memory with them."""
    tensor = theirs[0] if len(theirs) == 1 else torch.cat(tuple(theirs))
    if rule.transposed:
        tensor = tensor.t().contiguous()
    if rule.row_order == "head_major":
        tensor = _swap(tensor, config.num_heads, 3)
    if rule.row_order == "rotary_neighbours":
        tensor = _reorder_rotary(tensor, config, to_halves=True)
    return tensor.view(rule.shape) if rule.is_stacked else tensor


def to_theirs(rule: TensorRule, ours: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, ...]:
    """Return the tensors `rule.theirs` for our tensor: the inverse of `to_ours`."""
    if rule.row_order == "head_major":
        ours = _swap(ours, 3, config.num_heads)
    if rule.row_order == "rotary_neighbours":
        ours = _reorder_rotary(ours, config, to_halves=False)
    if rule.transposed:
        ours = ours.t().contiguous()
    if rule.is_stacked:
        return ours.unbind(0)
    return (ours,) if len(rule.theirs) == 1 else tuple(part.clone() for part in ours.split(rule.their_rows))


def is_concatenation(rule: TensorRule) -> bool:
    """Return whether our tensor consists of the rows of `rule.theirs` in their order, so that none must be moved."""
    return not rule.transposed and not rule.row_order


def our_rows_in_their_order(rule: TensorRule, config: ModelConfig) -> torch.Tensor | None:
    """Return the indices of our rows in the order of the rows of `rule.theirs`; None if the orders are the same."""
    if not rule.row_order:
        return None
    indices = torch.arange(rule.shape[0]).view(-1, 1)
    return torch.cat(to_theirs(replace(rule, transposed=False), indices, config)).view(-1)


def their_rows_in_our_order(rule: TensorRule, config: ModelConfig) -> torch.Tensor | None:
    """Return the indices of the rows of `rule.theirs` in the order of our rows; None if the orders are the same."""
    if not rule.row_order:
        return None
    indices = torch.arange(rule.shape[0]).view(-1, 1)
    return to_ours(replace(rule, transposed=False), [indices], config).view(-1)


def _swap(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Return the rows [outer, inner, rest] in the order [inner, outer, rest]."""
    rest = tensor.shape[1:]
    return tensor.reshape(outer, inner, -1, *rest).transpose(0, 1).reshape(-1, *rest).contiguous()


def _reorder_rotary(qkv: torch.Tensor, config: ModelConfig, *, to_halves: bool) -> torch.Tensor:
    """Reorder the rotary rows of each query and key head: neighbours to halves, or the inverse."""
    heads = config.num_heads + config.num_kv_heads
    qkv = qkv.clone()
    rotary = qkv[: heads * config.head_size].view(heads, config.head_size, -1)[:, : config.rotary_size]
    outer, inner = (config.rotary_size // 2, 2) if to_halves else (2, config.rotary_size // 2)
    rotary.copy_(rotary.unflatten(1, (outer, inner)).transpose(1, 2).flatten(1, 2).clone())
    return qkv


def to_transformers(state: Mapping[str, torch.Tensor], config: ModelConfig) -> State:
    """Return the state_dict of the transformers model of `config.hf_config`, including a tied head.

    Args:
        state: all tensors under the names of `as_module`. Dtypes are kept. The result may share these tensors.
    """
    rules = tensor_rules(config)
    differing = state.keys() ^ {rule.ours for rule in rules}
    assert not differing, f"missing in the state, or not in this model: {sorted(differing)}"
    result: State = {}
    for together in rules_by_module_tensors(config):
        result |= module_tensors(together, [state[rule.ours] for rule in together], config)
    if config.tie_word_embeddings:
        result[name_in_module(config.implementation.head_name(config), config)] = result[rules[0].theirs[0]]
    return result


def rules_by_module_tensors(config: ModelConfig) -> list[tuple[TensorRule, ...]]:
    """List the rules in groups: those of a group together make tensors of transformers' model, see `module_tensors`.

    A group has one rule, except that one tensor holds the experts' gates and the matrices next to them.
    """
    groups: dict[str, tuple[TensorRule, ...]] = {}
    for rule in tensor_rules(config):
        key = stacked_in_module(rule.theirs[0])[0] if rule.is_stacked else rule.ours
        groups[key] = (*groups.get(key, ()), rule)
    return list(groups.values())


def module_tensors(rules: Sequence[TensorRule], ours: Sequence[torch.Tensor], config: ModelConfig) -> State:
    """Return the tensors of transformers' model, by name in its state_dict, for a group of rules and our tensors.

    They may share memory with ours. Optimizer states that have a number for each weight are converted alike.
    """
    if rules[0].is_stacked:
        ordered = sorted(zip(rules, ours, strict=True), key=lambda pair: stacked_in_module(pair[0].theirs[0])[1])
        tensors = [tensor for _, tensor in ordered]
        return {stacked_in_module(rules[0].theirs[0])[0]: tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)}
    names = [name_in_module(name, config) for name in rules[0].theirs]
    return dict(zip(names, to_theirs(rules[0], ours[0], config), strict=True))
