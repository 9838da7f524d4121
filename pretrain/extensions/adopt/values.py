"""Read single values of other programs' files: numbers, precision, the state of a loss scaler."""

from typing import Any

import torch

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # keys of Manifest.loss_scale


def whole_number(value: Any) -> int | None:
    """Return the value if it is a whole number, otherwise None."""
    return value if type(value) is int else None


def number(value: Any) -> float | None:
    """Return a number, or the number of a tensor with one element; None for other values."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if type(value) in (int, float) else None


def precision_of_dtype(dtype: torch.dtype) -> str:
    """Return "bf16", "fp16" or, for all other dtypes, "fp32"."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def loss_scale_of(scaler: Any) -> dict[str, float] | None:
    """Return the state of fp16's loss scaler, an object or a dict, as in Manifest.loss_scale; None: it has none."""
    get = scaler.get if isinstance(scaler, dict) else lambda name: getattr(scaler, name, None)
    values = {name: number(get(name)) for name in _SCALER}
    return {name: value for name, value in values.items() if value is not None} or None
