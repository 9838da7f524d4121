"""Clip gradients at a percentile of the norms of past gradients (AutoClip: Seetharaman et al., arXiv 2007.14469).

The limit of a step is a percentile of the global norms, before clipping, of the last N updates. Until there are N, and
if the percentile is larger, the limit is the JSON's gradient_clipping.
"""

import functools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from pretrain.engine.patches.skip import also_skip_if
from pretrain.engine.steps import loss_scale


def limit_of(norms: Sequence[float], *, percentile: float, window: int, largest: float) -> float:
    """Return the limit after updates with these norms; 0 for none.

    Args:
        window: number of norms of which the percentile is taken, with linear interpolation.
        largest: limit before that number is reached, and upper bound afterwards; 0 for none.
    """
    if len(norms) < window:
        return largest
    limit = float(torch.quantile(torch.tensor(norms, dtype=torch.float64), percentile / 100))
    if limit == 0:  # all gradients were zero; as a limit, 0 would mean none
        return largest
    return min(limit, largest) if largest else limit


class AdaptiveClipping:
    """Sets the largest gradient norm of each update of an engine.

    The norms are Python numbers on each rank. DeepSpeed 0.19.8 waits for the norm in each step, as it looks for NaN
    (runtime/utils.py, is_invalid_grad_norm). Reading the norm there copies one number and waits for nothing else. All
    ranks have the same norm, and therefore the same limit.
    """

    def __init__(self, engine: DeepSpeedEngine, *, percentile: float, window: int) -> None:
        self._engine, self._percentile = engine, percentile
        self._largest = float(engine.gradient_clipping())
        self._norms: deque[float] = deque(maxlen=window)
        self._norm: float | None = None  # of this step; None: not computed yet, or not finite
        self.limit_in_force = self._largest or math.inf  # limit of the last update; infinity: none
        self._update = engine.optimizer.step
        engine.optimizer.step = functools.wraps(self._update)(lambda *args, **kwargs: self._step(*args, **kwargs))

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer. A skipped update does not enter the norms: a NaN, an overflow of fp16, a spike."""
        optimizer = self._engine.optimizer
        self._norm, self.limit_in_force = None, optimizer.clip_grad or math.inf
        with also_skip_if(self._observe, optimizer):
            result = self._update(*args, **kwargs)
        if self._norm is not None and not optimizer.overflow:
            self._norms.append(self._norm)
            self._set_limit()
        return result

    def _observe(self, scaled_norm: torch.Tensor) -> bool:
        if self._norm is None:
            self._norm = float(scaled_norm) / loss_scale(self._engine)
        return False

    def _set_limit(self) -> None:
        """Set the limit of the next update, which all optimizers of DeepSpeed and patches/pipeline.py read."""
        self._engine.optimizer.clip_grad = limit_of(self._norms, percentile=self._percentile,
                                                    window=self._norms.maxlen or 1, largest=self._largest)

    def state(self) -> list[float]:
        """Return the norms, oldest first: with them, a resumed run continues with the same limits."""
        return list(self._norms)

    def set_state(self, norms: Sequence[float] | None) -> None:
        """Replace the norms; None removes them. Of more norms than the window holds, the newest are kept."""
        self._norms.clear()
        self._norms.extend(norms or ())
        self._set_limit()
