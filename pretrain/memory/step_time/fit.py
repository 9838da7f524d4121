"""Fit of the step-time model's parameters to measurements."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pretrain.memory.step_time.time_parameters import TimeParameters

_FACTORS = (2.0, 1.3, 1.1, 1.03, 1.01)  # that each parameter is multiplied with or divided by, one after the other
_SMALLEST_GAIN = 1e-8
_MOST_ROUNDS = 200


def fit(parameters: TimeParameters, names: Sequence[str],
        error: Callable[[TimeParameters], float]) -> TimeParameters:
    """Minimize `error` by changing one of the named parameters at a time, with smaller and smaller factors."""
    best = error(parameters)
    for step in _FACTORS:
        for _ in range(_MOST_ROUNDS):
            before = best
            for name in names:
                for factor in (step, 1 / step):
                    changed = replace(parameters, **{name: getattr(parameters, name) * factor})
                    found = error(changed)
                    if found < best - _SMALLEST_GAIN:
                        best, parameters = found, changed
            if best == before:
                break
    return parameters
