"""Text of the shard index: one JSON file for each rank, with the location of every fragment in that rank's files.

`load/reader.py` reads the shard indexes.
"""

import json
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.fragments import FlatTensor, Fragment, base_optimizer, flat_tensors, group_of

FORMAT_WITH_PARTS = 2  # of an index that has parts of parameters; indexes without "format" have none


def index_name(rank: int) -> str:
    """Return the file name of a rank's shard index."""
    return f"shard_index_rank_{rank:05d}.json"


def index_json(engine: DeepSpeedEngine) -> str:
    """Return the text of this rank's shard index. Its keys are:

    - "format": 2 if this rank holds parts of parameters (tensor or expert parallelism); otherwise missing;
    - "optimizer": class name of the base optimizer;
    - "groups": numeric settings (lr, betas ...) of each parameter group of this optimizer;
    - "tensors": location, fragments and optimizer states of each flat tensor that this rank writes, padding aside.

    A tensor's entry lists an optimizer state under "elementwise" if the state has a number for each weight, under
    "scalars" if it is a single number (step ...), and under "other" if it is a tensor of another size. A fragment is
    [name, shape of the complete parameter, start, length, offset], and for a part also [dim, ranges] of the part.
    """
    optimizer = base_optimizer(engine)
    groups = optimizer.param_groups
    entries = [_entry(flat, optimizer.state.get(flat.parameter, {}), group_of(engine, flat))
               for flat in flat_tensors(engine) if flat.weights and flat.fragments]
    has_parts = any(len(fragment) > 5 for entry in entries for fragment in entry["fragments"])
    index: dict[str, Any] = {"format": FORMAT_WITH_PARTS} if has_parts else {}
    index |= {"optimizer": type(optimizer).__name__, "groups": [_numeric_settings(group) for group in groups],
              "tensors": entries}
    return json.dumps(index, separators=(",", ":"))


def is_elementwise(value: Any, flat: FlatTensor) -> bool:
    """Return whether an optimizer state has a number for each weight.

    An empty tensor counts too, because a state that is swapped out to NVMe is empty.
    """
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
            "other": other, "fragments": [_fragment(fragment) for fragment in flat.fragments]}


def _fragment(fragment: Fragment) -> list[Any]:
    found = [fragment.name, fragment.shape, fragment.start, fragment.length, fragment.offset]
    return found if fragment.part is None else [*found, [fragment.part.dim, fragment.part.ranges]]


def _numeric_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that are numbers or lists of numbers."""

    def as_floats(value: Any) -> Any:
        return [as_floats(item) for item in value] if isinstance(value, (list, tuple)) else float(value)

    return {key: as_floats(value) for key, value in group.items()
            if key != "params" and not isinstance(value, (bool, str)) and value is not None}
