"""Weights that cannot be right are found, and those of healthy models are not."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.checkpoint.format.fragments import FlatTensor, Fragment
from pretrain.checkpoint.load.odd_weights import WeightCheck, element, find_odd, index_in_parameter
from pretrain.errors import ConfigError
from pretrain.model.parameters import Part

BITS = {torch.float32: (torch.int32, 30), torch.bfloat16: (torch.int16, 14), torch.float16: (torch.int16, 14)}


def matrix(*, spread: float = 0.02, rows: int = 64, columns: int = 96) -> torch.Tensor:
    return spread * torch.randn(rows * columns, generator=torch.Generator().manual_seed(3))


def with_outliers(values: torch.Tensor, *outliers: float) -> torch.Tensor:
    values[17:17 + len(outliers)] = torch.tensor(outliers)
    return values


HEALTHY = {  # name -> flat values, and whether the tensor is a matrix; the outliers are those of published models
    "new matrix": (matrix(), True), "new norm": (torch.ones(64), False), "zeros": (torch.zeros(64), True),
    "bias of zeros but one": (with_outliers(torch.zeros(64), 3.0), False),
    "key biases of Qwen2": (with_outliers(10 * matrix(spread=1, rows=1), 420.0, -380.0), False),
    "norm with outlier dimensions": (with_outliers(torch.ones(4096), 60.0, -14.0), False),
    "super weight of a down projection": (with_outliers(matrix(), -4.2, 3.1), True),
    "embedding with unused rows": (with_outliers(torch.cat([matrix(spread=1.0), torch.zeros(6000)]), 70.0), True),
    "state matrix of Mamba": (torch.arange(1, 17).log().repeat(64), True), "empty": (torch.zeros(0), True),
    "positions of GPT-2": (with_outliers(matrix(spread=0.12), 4.1, -3.7), True)}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_weights_are_not_odd(name: str) -> None:
    values, is_matrix = HEALTHY[name]
    assert find_odd(values, is_matrix=is_matrix) is None


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_flipped_bit_of_an_exponent_is_found(name: str, dtype: torch.dtype) -> None:
    """The highest bit, in elements that are as large as the others. Lower bits change a value by less."""
    healthy, is_matrix = HEALTHY[name]
    words, bit = BITS[dtype]
    usual = float(healthy.square().mean().sqrt()) if len(healthy) else 0.0
    for index in (healthy.abs() > 0.5 * usual).nonzero().flatten()[:20].tolist() if usual else []:
        stored = healthy.to(dtype, copy=True)
        stored.view(words)[index] ^= 1 << bit
        if stored[index].abs() < 1:  # the bit is set in values from 2 on, which become small
            continue
        odd = find_odd(stored.float(), is_matrix=is_matrix)
        assert odd is not None, (index, stored[index])
        assert odd.index == index
        assert odd.value == stored[index].item() or math.isnan(odd.value)
        assert odd.scale < 1000 or not math.isfinite(odd.value)


@pytest.mark.parametrize(("fp16", "value", "found"), [
    (True, 1e5, "this weight is 1e+05, which is infinite in fp16"), (False, 1e5, ""),
    (False, -math.inf, "this weight is -inf"), (False, math.nan, "this weight is nan")])
def test_values_that_the_precision_does_not_have_are_rejected(fp16: bool, value: float, found: str) -> None:
    values = matrix(rows=3, columns=4)
    values[6] = value
    flat = FlatTensor(0, values, 12, (Fragment("w", (3, 4), start=0, length=12, offset=0),), None)
    engine: Any = SimpleNamespace(fp16_enabled=lambda: fp16)
    check = WeightCheck(engine, "folder", lambda name, index: element(name, (3, 4), index))
    with pytest.raises(ConfigError, match=re.escape(f"folder: w[1, 2]: {found}")) if found else nullcontext():
        check.add(flat)


def test_elements_are_named_by_their_place_in_the_complete_parameter() -> None:
    complete = torch.arange(6 * 8).view(6, 8)
    for part in (None, Part((6, 8), 1, ((1, 3), (5, 8))), Part((6, 8), 0, ((2, 3), (4, 6)))):
        held = (complete if part is None else part.of(complete)).flatten()
        fragment = Fragment("w", (6, 8), start=4, length=9, offset=0, part=part)
        for index in range(fragment.length):
            found = index_in_parameter(fragment, index)
            assert complete.flatten()[found] == held[4 + index]
    assert element("w", (6, 8), 19) == "w[2, 3]"
