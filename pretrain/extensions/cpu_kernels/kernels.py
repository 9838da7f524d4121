"""Offer kernels for CPUs to the operators of the model (pretrain/model/operators.py), each for some inputs."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.extensions.cpu_kernels import c_functions
from pretrain.extensions.cpu_kernels.attention_in_c import AttentionInC, AttentionInFp32, instructions, is_usual
from pretrain.extensions.cpu_kernels.attention_products import AttentionByProducts
from pretrain.extensions.cpu_kernels.c_functions import transposed
from pretrain.extensions.cpu_kernels.choice import as_json, choose, chosen, fastest_choice, in_c, set_choice
from pretrain.extensions.cpu_kernels.library import simulate_calls
from pretrain.model.kernels.activation import ACTIVATION, ActivationKernel
from pretrain.model.kernels.documents import Documents
from pretrain.model.kernels.fused_loss import LOSS, LossKernel, LossTerms, adds_in_fp32
from pretrain.model.kernels.linear import LINEAR, Products
from pretrain.model.kernels.norm import NORM, NormKernel, NormSettings
from pretrain.model.kernels.torch_attention import ATTENTION, AttentionSettings, Rotation, Tensors
from pretrain.model.layer_memory import CPU_PRODUCT
from pretrain.model.operators import Kernels, Offer
from pretrain.monitor.read_run_folder import newest_recorded

if TYPE_CHECKING:
    from pretrain.config.plan import Plan

_BF16, _FP32 = torch.bfloat16, torch.float32
_LEAST_ROWS = 64  # in fp32, fewer rows do not repay the rearranged copy of the right-hand matrix
_RECORD = "cpu_kernels"  # key of run.json


class CpuKernels(Kernels):
    """The kernels for CPUs. Which families of them are in C is chosen in choice.py."""

    def offers(self) -> "Iterator[Offer[Any]]":
        """Yield the offers; the attention that is made of torch's matrix products is the last one of attention."""
        yield Offer("norm in C", NORM, _is_norm_in_c, NormInC())
        yield Offer("products of oneDNN, and sums in C", LINEAR, _is_linear_in_c, ProductsInC())
        yield Offer("activation in C", ACTIVATION, _is_activation_in_c, ActivationInC())
        yield Offer("attention in C", ATTENTION, _is_attention_in_c, AttentionInC())
        yield Offer("attention in C, fp32", ATTENTION, _is_attention_in_fp32, AttentionInFp32())
        yield Offer("attention from products", ATTENTION, _is_attention_of_products, AttentionByProducts())
        yield Offer("loss in C, fp32", LOSS, lambda x: in_c("loss", x, _FP32), LossInC())
        yield Offer("loss in C", LOSS, lambda x: in_c("loss", x, _BF16), TransposedLossInC())

    def choose(self, plan: "Plan") -> None:
        """Choose the families in C: see choice.choose."""
        recorded = newest_recorded(Path(plan.args.save), _RECORD) if plan.args.save and dist.get_rank() == 0 else None
        choose(recorded, measured=not plan.args.deterministic)

    def simulate(self, tensor_type: type[torch.Tensor]) -> None:
        """Choose by measurements on real tensors, and let C functions do nothing from now on."""
        set_choice(fastest_choice())
        simulate_calls(tensor_type)


def record(plan: "Plan") -> dict[str, Any]:
    """Return the choice for run.json; a resume uses it again."""
    choice = chosen()
    return {_RECORD: None if choice is None else as_json(choice)}


def _is_norm_in_c(x: torch.Tensor, weight: torch.Tensor, settings: NormSettings) -> bool:
    # torch's LayerNorm in fp32 is as fast, and takes less Python
    return weight.dtype == x.dtype and (settings.is_rms or x.dtype != _FP32) and in_c("norm", x, _BF16, _FP32)


def _is_linear_in_c(x: torch.Tensor, other: torch.Tensor) -> bool:
    if x.dtype != other.dtype:
        return False
    if x.dtype == _FP32:
        return x.numel() >= _LEAST_ROWS * x.shape[-1] and in_c("linear_fp32", x, _FP32)
    return in_c("linear", x, _BF16)


def _is_activation_in_c(name: str, x: torch.Tensor) -> bool:
    names = c_functions.ACTIVATIONS_IN_C_FP32 if x.dtype == _FP32 else c_functions.ACTIVATIONS_IN_C
    return name in names and in_c("activation", x, _BF16, _FP32)


def _is_attention_in_c(inputs: Tensors, settings: AttentionSettings, rope: Rotation | None,
                       documents: Documents | None, dropout: float) -> bool:
    return dropout == 0.0 and in_c("attention", inputs[0], _BF16) and instructions() > 0 \
        and _has_head_per_thread(inputs[0], settings)


def _is_attention_in_fp32(inputs: Tensors, settings: AttentionSettings, rope: Rotation | None,
                          documents: Documents | None, dropout: float) -> bool:
    return dropout == 0.0 and rope is None and in_c("attention_fp32", inputs[0], _FP32) \
        and is_usual(inputs, settings, documents) and _has_head_per_thread(inputs[0], settings)


def _is_attention_of_products(inputs: Tensors, settings: AttentionSettings, rope: Rotation | None,
                              documents: Documents | None, dropout: float) -> bool:
    return dropout == 0.0 and inputs[0].device.type == "cpu" and (
        inputs[0].dtype == _BF16 or (documents is not None and not documents.are_whole_samples))


def _has_head_per_thread(x_BTHE: torch.Tensor, settings: AttentionSettings) -> bool:
    return x_BTHE.shape[0] * settings.num_kv_heads >= torch.get_num_threads()


class NormInC(NormKernel):
    """Sum and norm as one C function, in bf16, and in fp32 for RMSNorm. Keeps only the sum for the backward pass."""

    is_recomputed = True

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
                 settings: NormSettings) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = _ResidualNorm.apply(x, added, weight, bias, settings)
        return result

    def recompute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                  settings: NormSettings) -> torch.Tensor:
        """Return the norm of x without a gradient."""
        return c_functions.norm(x, None, weight, bias, settings)[1]


class _ResidualNorm(torch.autograd.Function):
    """Sum and norm in C. The gradient of the sum, or of the norm, may be missing."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor,
                bias: torch.Tensor | None, settings: NormSettings) -> tuple[torch.Tensor, torch.Tensor]:
        total, out = c_functions.norm(x, added, weight, bias, settings)
        ctx.save_for_backward(x if added is None else total, weight)  # x may be a view, and `total` a copy of it
        ctx.settings, ctx.with_bias = settings, bias is not None  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        if grads[1] is None:
            return grads[0], grads[0] if ctx.needs_input_grad[1] else None, None, None, None
        dtotal, dweight, dbias = c_functions.norm_backward(
            grads[1], total, grads[0], weight, ctx.settings,  # type: ignore[attr-defined]
            with_bias=ctx.with_bias)  # type: ignore[attr-defined]
        return dtotal, dtotal if ctx.needs_input_grad[1] else None, dweight, dbias, None  # type: ignore[attr-defined]


class ProductsInC(Products):
    """In bf16, torch's products in the forms that oneDNN computes fast; in fp32, products in C, with enough rows.

    With the shapes of a small model in fp32, 768 rows and 128 to 512 columns, those in C take 0.86 to 0.92 of the time
    of MKL's on one core of an AMD EPYC.
    """

    def product(self, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight^T + bias."""
        return c_functions.linear(x, weight_OI, bias_O)

    def input_gradient(self, grad_NO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return grad @ weight, [N, I]."""
        return c_functions.input_gradient_fp32(grad_NO, weight_OI) if grad_NO.dtype == _FP32 else grad_NO @ weight_OI

    def weight_gradient(self, x_NI: torch.Tensor, grad_NO: torch.Tensor) -> torch.Tensor:
        """Return grad^T @ x, [O, I]."""
        return c_functions.weight_gradient(x_NI, grad_NO)

    def bias_gradient(self, grad_NO: torch.Tensor) -> torch.Tensor:
        """Return the sum over the rows, [O]."""
        return c_functions.column_sum(grad_NO) if grad_NO.dtype == _BF16 else grad_NO.sum(0)


class ActivationInC(ActivationKernel):
    """Activations in C. In the backward pass, one function computes the inner tensor and the gradients."""

    def activate(self, name: str, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Apply one of ACTIVATIONS to each element, and multiply the result by `up`, if there is one."""
        return c_functions.activate(name, x) if up is None else c_functions.gated(name, x, up)

    def gradients(self, name: str, grad_ND: torch.Tensor, up_BTF: torch.Tensor, gate_BTF: torch.Tensor | None,
                  weight_DF: torch.Tensor,
                  products: Products) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return the gradients of up, gate and weight."""
        dinner_BTF, dgate_BTF = products.input_gradient(grad_ND, weight_DF).view_as(up_BTF), None
        if gate_BTF is None:
            dup_BTF, inner_BTF = c_functions.activate_backward(name, dinner_BTF, up_BTF)
        else:
            dup_BTF, dgate_BTF, inner_BTF = c_functions.gated_backward(name, dinner_BTF, gate_BTF, up_BTF)
        return dup_BTF, dgate_BTF, products.weight_gradient(inner_BTF.flatten(0, -2), grad_ND)


class LossInC(LossKernel):
    """The losses and their gradient in C (cross_entropy.c), unless the logits are capped."""

    def cross_entropy_(self, logits_CV: torch.Tensor, labels_C: torch.Tensor, *, with_grad: bool, softcap: float,
                       terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropies and the logsumexps, and overwrite the logits with the gradient."""
        if softcap:
            return super().cross_entropy_(logits_CV, labels_C, with_grad=with_grad, softcap=softcap, terms=terms)
        return c_functions.cross_entropy_(logits_CV, labels_C, with_grad=with_grad,
                                          label_smoothing=terms.label_smoothing, z_loss=terms.z_loss)


class TransposedLossInC(LossInC):
    """The same in bf16, where the gradient of the matrix is accumulated as its transpose [D, V].

    The product of x^T and G needs a copy of a small matrix only, and that of G^T and x, which oneDNN computes at about
    0.6 of the rate, would need a copy of the large one. Measured on an Intel core with AMX, in milliseconds for 1,024
    tokens, hidden size 512 and a vocabulary of 16k: the three products 52 instead of 66, the losses and their gradient
    13 instead of 41.
    """

    def no_gradient(self, weight_VD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros [D, V]."""
        return torch.zeros(weight_VD.t().shape, device=weight_VD.device, dtype=dtype)

    def add_gradient(self, dw_DV: torch.Tensor, gradient_CV: torch.Tensor, x_CD: torch.Tensor) -> None:
        """Add x^T G to the transpose [D, V]."""
        x_DC = transposed(x_CD)
        if dw_DV.dtype == gradient_CV.dtype:
            dw_DV.addmm_(x_DC, gradient_CV)
        elif adds_in_fp32(gradient_CV.dtype, gradient_CV.device):
            torch.addmm(dw_DV, x_DC, gradient_CV, out_dtype=dw_DV.dtype, out=dw_DV)
        else:  # products of a part of the vocabulary
            words = max(1, CPU_PRODUCT // x_CD.shape[1])
            for sum_part, part in zip(dw_DV.split(words, 1), gradient_CV.split(words, 1), strict=True):
                c_functions.add_(sum_part, x_DC @ part)

    def scaled_gradient(self, dw_DV: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the matrix [V, D], multiplied by a scalar tensor."""
        return c_functions.multiply_(transposed(dw_DV), scale)
