"""Weights that cannot be right are found, and those of healthy models are not."""

import math

import pytest
import torch

from pretrain.checkpoint.format.fragments import Fragment
from pretrain.checkpoint.load.odd_weights import element, find_odd, index_in_parameter
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


def test_elements_are_named_by_their_place_in_the_complete_parameter() -> None:
    complete = torch.arange(6 * 8).view(6, 8)
    for part in (None, Part((6, 8), 1, ((1, 3), (5, 8))), Part((6, 8), 0, ((2, 3), (4, 6)))):
        held = (complete if part is None else part.of(complete)).flatten()
        fragment = Fragment("w", (6, 8), start=4, length=9, offset=0, part=part)
        for index in range(fragment.length):
            found = index_in_parameter(fragment, index)
            assert complete.flatten()[found] == held[4 + index]
    assert element("w", (6, 8), 19) == "w[2, 3]"
