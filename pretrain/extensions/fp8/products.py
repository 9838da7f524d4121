"""Matrix products of linear layers in FP8, with the casts and scales of torchao's float8 training.

Each product casts its two operands from bf16, with a scale of the complete tensor ("tensorwise") or of each row and
column of the product ("rowwise"), and returns bf16. Weights and saved tensors remain in bf16: parameter names,
checkpoints, and what ZeRO partitions do not change.

torchao's Float8Linear computes the same bits (tests/extensions/fp8/test_products.py). Its autograd function saves a
transposed view of the weight, whose memory ZeRO-3 could not free; `linear` and `activated_linear` save the parameter
itself.

Shapes: N rows (tokens), I inputs, O outputs.
"""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pretrain.extensions.fp8.extension import Fp8
from pretrain.model.kernels.linear import LINEAR, Products
from pretrain.model.layers.linear import use_products

if TYPE_CHECKING:
    from pretrain.config.plan import Plan

_FORWARD, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2  # torchao's defaults; rowwise has the first one for both


def multiply_in_fp8(module: torch.nn.Module, plan: "Plan") -> None:
    """Let the linear layers of a model or a block multiply in FP8; emulate it on CPUs."""
    recipe = plan.args.of(Fp8).fp8
    assert recipe is not None
    use_products(module, Fp8Products(recipe, emulate=plan.device.kind == "cpu"))


def _torchao() -> tuple[Any, Any]:
    """Import torchao's modules of operators and of casts, which takes 1.5 s.

    torchao logs which of its compiled extensions do not fit this machine; none of them is used here.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from torchao.float8 import float8_ops, float8_utils
    finally:
        logging.disable(before)
    return float8_ops, float8_utils


@dataclass(frozen=True)
class Fp8Products(Products):
    """The three products of a linear layer in FP8.

    Args:
        recipe: "tensorwise" or "rowwise", as in torchao's Float8LinearRecipeName.
        emulate: multiply the cast values in fp32, for devices without FP8 products.
    """

    recipe: str
    emulate: bool
    _torchao: tuple[Any, Any] = field(default_factory=_torchao, init=False, repr=False, compare=False)

    def product(self, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight^T + bias."""
        out_NO = self._multiply(x.flatten(0, -2), weight_OI.t(), _FORWARD, _FORWARD, fast=True)
        out = out_NO.view(*x.shape[:-1], -1)
        return out if bias_O is None else out + bias_O

    def input_gradient(self, grad_NO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return grad @ weight, [N, I]."""
        return self._multiply(grad_NO, weight_OI, self._gradient_dtype, _FORWARD)

    def weight_gradient(self, x_NI: torch.Tensor, grad_NO: torch.Tensor) -> torch.Tensor:
        """Return grad^T @ x, [O, I]."""
        return self._multiply(grad_NO.t(), x_NI, self._gradient_dtype, _FORWARD)

    def bias_gradient(self, grad_NO: torch.Tensor) -> torch.Tensor:
        """Return the sum over the rows, [O]."""
        return LINEAR.choose(grad_NO, grad_NO).bias_gradient(grad_NO)

    @property
    def _gradient_dtype(self) -> torch.dtype:
        return _GRADIENT if self.recipe == "tensorwise" else _FORWARD

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, a_dtype: torch.dtype, b_dtype: torch.dtype, *,
                  fast: bool = False) -> torch.Tensor:
        """Return a @ b in the dtype of a.

        Args:
            fast: let the tensor cores add in less than fp32.
        """
        (a_fp8, a_scale), (b_fp8, b_scale) = self._cast(a, a_dtype, -1), self._cast(b, b_dtype, 0)
        if self.emulate:
            return torch.mm(a_fp8.float().div_(a_scale), b_fp8.float().div_(b_scale)).to(a.dtype)
        operators, _ = self._torchao
        # cuBLAS takes the first matrix in the order of its rows, and the second one in the order of its columns
        out: torch.Tensor = operators.addmm_float8_unwrapped(
            a_fp8.contiguous(), a_scale, b_fp8.t().contiguous().t(), b_scale, a.dtype, use_fast_accum=fast)
        return out

    def _cast(self, x: torch.Tensor, dtype: torch.dtype, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x * scale in FP8, and the scale in fp32. `axis`: over which the product adds."""
        _, utils = self._torchao
        if self.recipe == "tensorwise":
            scale = utils.amax_to_scale(x.abs().max(), dtype)
        else:
            scale = utils.amax_to_scale(x.abs().amax(axis, keepdim=True), dtype, round_scales_to_power_of_2=True)
        most = torch.finfo(dtype).max
        # in place, unlike torchao's to_fp8_saturated: fp32 copies of activations are large
        return x.float().mul_(scale).clamp_(-most, most).to(dtype), scale

