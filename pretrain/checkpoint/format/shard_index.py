"""The shard index: a JSON file for each rank that says where its checkpoint files hold which fragments.

`load/reader.py` reads it.
"""

import json
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.fragments import FlatTensor, base_optimizer, flat_tensors, group_of


def index_name(rank: int) -> str:
    """Name of a rank's shard index."""
    return f"shard_index_rank_{rank:05d}.json"


def index_json(engine: DeepSpeedEngine) -> str:
    """Describe, as JSON, where `save_checkpoint` writes each flat tensor of this rank.

    "optimizer" is the class of the base optimizer, "groups" are the numeric settings of its parameter groups (lr,
    betas ...), and "tensors" has one entry for each flat tensor. An optimizer state is listed under "elementwise" if it
    has a number for each weight, and otherwise under "scalars" (step ...) or "other".
    """
    optimizer = base_optimizer(engine)
    groups = optimizer.param_groups
    entries = [_entry(flat, optimizer.state.get(flat.parameter, {}), group_of(engine, flat))
               for flat in flat_tensors(engine) if flat.weights and flat.fragments]
    return json.dumps({"optimizer": type(optimizer).__name__, "groups": [_numeric_settings(group) for group in groups],
                       "tensors": entries}, separators=(",", ":"))


def is_elementwise(value: Any, flat: FlatTensor) -> bool:
    """Return whether a state has a number for each weight. A state that is swapped out to NVMe is an empty tensor."""
    return torch.is_tensor(value) and value.dim() > 0 and value.numel() in (flat.numel, 0)


def _entry(flat: FlatTensor, state: dict[str, Any], group: int) -> dict[str, Any]:
    assert flat.weights is not None
    assert flat.states is not None
    scalars = {key: float(value) for key, value in state.items()
               if isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0)}
    elementwise = [key for key, value in state.items() if is_elementwise(value, flat)]
    other = [key for key, value in state.items()
             if key not in scalars and key not in elementwise and torch.is_tensor(value)]
    return {"group": group, "weights": [flat.weights.file, flat.weights.keys],
            "states": [flat.states.file, flat.states.keys], "elementwise": elementwise, "scalars": scalars,
            "other": other, "fragments": [[f.name, f.shape, f.start, f.length, f.offset] for f in flat.fragments]}


def _numeric_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that are numbers or lists of numbers."""

    def as_floats(value: Any) -> Any:
        return [as_floats(item) for item in value] if isinstance(value, (list, tuple)) else float(value)

    return {key: as_floats(value) for key, value in group.items()
            if key != "params" and not isinstance(value, (bool, str)) and value is not None}
