"""Passes over gradients in C, compared with torch's operators."""

import pytest
import torch

from pretrain.extensions.cpu_kernels.c_functions import add_, euclidean_norm, has_not_finite, multiply_, scale_to_float_
from pretrain.extensions.cpu_kernels.library import has_library

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
SIZES = (0, 1, 31, 16384, 50001)


def gradient(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_norms_and_scaled_copies(size, dtype):
    x = gradient(size, dtype)
    assert euclidean_norm(x).dtype == torch.float64
    torch.testing.assert_close(euclidean_norm(x), torch.linalg.vector_norm(x.double()), rtol=1e-12, atol=0)
    assert torch.equal(scale_to_float_(torch.empty(size), x, 0.3), x.float() * torch.tensor(0.3))
    assert not has_not_finite(x)


@DTYPES
@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_single_element_that_is_not_finite_is_found(value, size, dtype):
    for place in {0, size // 2, size - 1}:
        x = gradient(size, dtype)
        x[place] = torch.finfo(dtype).max  # large, but finite
        assert not has_not_finite(x)
        assert euclidean_norm(x).isfinite()
        x[place] = value
        assert has_not_finite(x)
        assert not euclidean_norm(x).isfinite()
        assert not multiply_(x.bfloat16(), 0.5)[place].isfinite()
        assert not scale_to_float_(torch.empty(size), x, 0.5)[place].isfinite()


@pytest.mark.parametrize("size", SIZES)
def test_products_in_bf16_are_rounded_once(size):
    x = gradient(size, torch.bfloat16)
    wanted = (x.double() * 0.3).bfloat16()
    torch.testing.assert_close(multiply_(x.clone(), 0.3), wanted, rtol=2**-8, atol=0)
    assert torch.equal(multiply_(x.clone(), 0.5), x / 2)


@pytest.mark.parametrize("shape", [(7, 33), (512, 2048), (3, 1)])
def test_sums_in_fp32_change_only_the_named_columns(shape):
    x = gradient(shape[0] * shape[1], torch.bfloat16).view(shape)
    total = gradient(shape[0] * 3 * shape[1], torch.float32).view(shape[0], -1)
    wanted = total.clone()
    wanted[:, shape[1]:2 * shape[1]] += x
    add_(total[:, shape[1]:2 * shape[1]], x)
    assert torch.equal(total, wanted)


def test_norms_do_not_depend_on_the_number_of_threads():
    x, threads = gradient(200_001, torch.bfloat16), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(euclidean_norm(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
