"""Weights that cannot be right: NaN, infinity, or one value far beyond the scale of its tensor.

A flipped bit of an exponent makes 1e30 of 0.02, and in fp16 1300. Checkpoints have hashes, which find it; folders of
transformers and runs of other programs often have none. Such a value is finite, so a run would train: with a gradient
of 0, if the value saturates a layer. Published models are far from the limits: biases of Qwen2 reach some hundred, and
single weights of LLaMA's matrices some hundred times the scale of their matrix.

Each rank looks at the weights that it holds, once, when they are loaded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.fragments import FlatTensor, Fragment
from pretrain.distributed.collectives import gather_problems
from pretrain.errors import ConfigError, counted

_RATIO = 1000.0  # ratio of an absurd value to the root mean square of the others in its tensor
_LEAST_SCALE = (1.0, 0.02)  # scale of vectors, and of matrices: new norms have 1, and matrices of new models 0.02
_LARGEST = 1e5  # a larger value is absurd, whatever the others are
_MOST_NAMED = 3  # tensors that a warning names


@dataclass(frozen=True)
class OddWeight:
    """The worst value of the elements of a tensor that a rank holds."""

    index: int  # among these elements
    value: float
    scale: float  # root mean square of the others; NaN if the value is not finite


def find_odd(values: torch.Tensor, *, is_matrix: bool) -> OddWeight | None:
    """Return the worst of the values, a flat tensor, if it is NaN, infinite or absurd.

    Most tensors are read once, and nothing is allocated: `isfinite()` would allocate several tensors.
    """
    if not values.numel():
        return None
    low, high = (extreme.item() for extreme in values.aminmax())  # both are NaN if any value is
    least = _LEAST_SCALE[is_matrix]
    worst = max(abs(low), abs(high))
    if worst <= _RATIO * least:  # false for NaN
        return None
    if not math.isfinite(low) or not math.isfinite(high):
        index = int(values.isfinite().logical_not().to(torch.uint8).argmax())
        return OddWeight(index, values[index].item(), math.nan)
    index = int(values.argmax() if high >= -low else values.argmin())
    others = values.double() / worst  # squares of large values are infinite
    others[index] = 0
    scale = worst * math.sqrt(float(others @ others) / max(len(others) - 1, 1))
    is_absurd = worst > min(_RATIO * max(scale, least), _LARGEST)
    return OddWeight(index, values[index].item(), scale) if is_absurd else None


def element(name: str, shape: Sequence[int], index: int) -> str:
    """Return the name of an element of a tensor, such as NAME[3, 17]."""
    return f"{name}{[int(each) for each in np.unravel_index(index, shape)]}"


def index_in_parameter(fragment: Fragment, index: int) -> int:
    """Return the index in the flattened complete parameter of an element of a fragment."""
    index, part = index + fragment.start, fragment.part
    if part is None:
        return index
    places = [int(each) for each in np.unravel_index(index, part.local_shape)]
    held = [place for start, stop in part.ranges for place in range(start, stop)]
    places[part.dim] = held[places[part.dim]]
    return int(np.ravel_multi_index(places, part.shape))


class WeightCheck:
    """Looks at the weights of a rank as they are loaded.

    Args:
        source: folder of the weights, for messages.
        place: returns the file and element for the name of a parameter and the index in it.
    """

    def __init__(self, engine: DeepSpeedEngine, source: object, place: Callable[[str, int], str]) -> None:
        self._source, self._place, self._absurd = source, place, list[str]()
        self._largest = float(torch.finfo(torch.float16).max) if engine.fp16_enabled() else math.inf

    def add(self, flat: FlatTensor) -> None:
        """Look at a flat tensor, unless it is on NVMe. Raises ConfigError for NaN and infinity."""
        values = flat.parameter.detach().view(-1)
        for fragment in flat.fragments if values.numel() >= flat.numel else ():
            held = values.narrow(0, fragment.offset, fragment.length)
            odd = find_odd(held, is_matrix=len(fragment.shape) > 1)
            if odd is None:
                continue
            place = self._place(fragment.name, index_in_parameter(fragment, odd.index))
            if not abs(odd.value) <= self._largest or not math.isfinite(odd.value):
                precision = ", which is infinite in fp16" if math.isfinite(odd.value) else ""
                raise ConfigError(f"{self._source}: {place}", problem=f"this weight is {odd.value:.4g}{precision}",
                                  remedy="load the file again from its source, or use other weights")
            self._absurd.append(f"{place} is {odd.value:.4g}, and the others have a root mean square of "
                                f"{odd.scale:.2g}")

    def warnings(self) -> list[str]:
        """Return a warning that names the absurd weights of all ranks, if there are any; collective."""
        found = list(dict.fromkeys(gather_problems(self._absurd)))  # ranks may have copies
        if not found:
            return []
        named = found if len(found) <= _MOST_NAMED else [
            *found[:_MOST_NAMED], f"and {counted(len(found) - _MOST_NAMED, 'other tensor')}"]
        return [f"{self._source} has absurd weights: {'; '.join(named)}. A damaged file or memory gives such values: "
                "compare the file with its source before you train further"]
