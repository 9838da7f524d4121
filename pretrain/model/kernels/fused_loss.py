"""Head and cross-entropy as one operator that never materializes all logits.

For each chunk of tokens: logits = x W^T + b and loss_i = logsumexp(logits_i) - logits_i[label_i]. The gradient of the
losses is G = softmax(logits) - onehot(label). The forward pass computes the chunk's part of dx = w G W, dW = G^T w x
and db = G^T w at once, as Liger does (arXiv 2410.10989, section 3.2). Without chunks a micro-batch of 4,096 tokens and
a vocabulary of 50k need 0.4 GB for logits in bf16, and two or three times 0.8 GB for softmax and gradient in fp32.
With soft-capping, logits = cap tanh((x W^T + b) / cap), and G is multiplied by the derivative 1 - (logits / cap)^2. On
CUDA this takes one more tensor [C, V] in fp32.

In bf16 and fp16, the parts of dW are added in fp32, and dW is rounded once. Added in bf16, its error would grow with
the number of chunks: 2.9 times torch's with a single product at 32k tokens (tests/model/test_operators.py). The fp32
sum exists during the forward pass only, and only if there is more than one chunk.

In training, the gradient can have more terms than the cross-entropy: with label smoothing e (Szegedy et al., arXiv
1512.00567, section 7; as torch's F.cross_entropy) and z-loss z (PaLM, arXiv 2204.02311, section 5), it belongs to

    loss_i = logsumexp(logits_i) - (1 - e) logits_i[label_i] - e mean(logits_i) + z logsumexp(logits_i)^2,
    G_i    = (1 + 2 z logsumexp(logits_i)) softmax(logits_i) - (1 - e) onehot(label_i) - e / V.

This takes at most two more passes over the softmax, and no memory. The returned loss remains the cross-entropy.

DeepSpeed's TiledFusedLogitsLoss (runtime/sequence_parallel/ulysses_sp.py) cannot be used: it adds to `.grad` in the
forward pass, before fp16's loss scale is known, and it does not support tied weights.

Shapes: B batch, T positions, N = B * T tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.errors import ConfigError
from pretrain.model.kernels.vocabulary_shards import VocabularyShard, cross_entropy_over_shards_
from pretrain.model.layer_memory import CHUNK_TOKENS, CPU_LOGITS, CPU_PRODUCT
from pretrain.model.operators import Operator
from pretrain.model.parallel.shared_tensors import gather

_UNIT = 1024.0  # sum of the weights within dW, up to a factor of 2: keeps dW in fp16's range without the loss scale


@dataclass(frozen=True)
class LossTerms:
    """Coefficients of the terms that the training loss has in addition to the cross-entropy."""

    label_smoothing: float = 0.0  # probability that the target spreads evenly over the vocabulary
    z_loss: float = 0.0  # coefficient of the squared logsumexp of the logits
    # (logits [C, V] fp32, labels [C]) -> losses [C]: the user's loss, in training in place of the cross-entropy
    own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


CROSS_ENTROPY = LossTerms()  # no additional terms


class LossKernel:
    """The steps of the operator for a chunk of tokens, by torch's operators."""

    def cross_entropy_(self, logits_CV: torch.Tensor, labels_C: torch.Tensor, *, with_grad: bool, softcap: float,
                       terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropies and the logsumexps, [C] each.

        With `with_grad`, overwrite the logits before the cap with the gradient of the loss that has all `terms`.
        """
        step = len(logits_CV)
        if logits_CV.device.type == "cpu":
            step = max(1, CPU_LOGITS * torch.get_num_threads() // logits_CV.shape[1])
        losses, log_zs = [], []
        precise = torch.promote_types(logits_CV.dtype, torch.float32)
        for logits, labels in zip(logits_CV.split(step), labels_C[:, None].split(step), strict=True):
            capped = logits.to(precise, copy=True).div_(softcap).tanh_().mul_(softcap) if softcap else logits
            at_label = capped.gather(1, labels)
            largest = capped.amax(1, keepdim=True)
            p = torch.softmax(capped, dim=1, dtype=precise)
            # the largest probability is 1 / sum(exp(logits - largest)), at least 1 / V: its log is precise
            log_z = largest.to(p.dtype) - p.amax(1, keepdim=True).log()
            losses.append((log_z - at_label.to(p.dtype))[:, 0])
            log_zs.append(log_z[:, 0])
            if with_grad:
                _to_gradient_(p, labels, log_z, terms)
                if softcap:
                    p.mul_(capped.div_(softcap).square_().neg_().add_(1))
                logits.copy_(p)
        return torch.cat(losses), torch.cat(log_zs)

    def no_gradient(self, weight_VD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, to which `add_gradient` adds the gradient of the matrix, in an order of its own."""
        return torch.zeros(weight_VD.shape, device=weight_VD.device, dtype=dtype)

    def add_gradient(self, dw_VD: torch.Tensor, gradient_CV: torch.Tensor, x_CD: torch.Tensor) -> None:
        """Add G^T x to the gradient of the matrix."""
        if dw_VD.dtype == x_CD.dtype:
            dw_VD.addmm_(gradient_CV.t(), x_CD)
        elif adds_in_fp32(x_CD.dtype, x_CD.device):
            torch.addmm(dw_VD, gradient_CV.t(), x_CD, out_dtype=dw_VD.dtype, out=dw_VD)
        else:  # products of a part of the vocabulary
            words = max(1, CPU_PRODUCT // x_CD.shape[1])
            for sum_part, part in zip(dw_VD.split(words), gradient_CV.t().split(words), strict=True):
                sum_part.add_(part @ x_CD)

    def scaled_gradient(self, dw: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the matrix [V, D], multiplied by a scalar tensor."""
        return (dw * scale).to(dw.dtype)


LOSS = Operator(LossKernel())  # its inputs: x


def fused_linear_cross_entropy(x_BTD: torch.Tensor, weight_VD: torch.Tensor, labels_BT: torch.Tensor,
                               weights_BT: torch.Tensor, bias_V: torch.Tensor | None = None,
                               softcap: float = 0.0, terms: LossTerms = CROSS_ENTROPY,
                               plain: bool = False,
                               shard: VocabularyShard | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of weight * cross-entropy and of weight * logsumexp(logits)^2 over the tokens: fp32 scalars.

    The softmax is computed in fp32. The first sum has the gradient of the loss with all `terms`. The second one
    has no gradient; it is 0 without z-loss, and where no gradient is computed.

    Saved for the backward pass: dx [B*T, D] and dW [V, D] in the dtypes of x and W, a vector [B*T], and with a bias its
    gradient [V] in fp32.

    Args:
        softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
        plain: call torch's operators only.
        shard: the words that weight and bias have, if they have a part of the vocabulary. Then x is this rank's shard
            of the sequences, and labels and weights are complete: the call is collective, and the sums are equal on
            all ranks of the group.
    """
    parameters = (weight_VD,) if bias_V is None else (weight_VD, bias_V)
    with_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (x_BTD, *parameters))
    carrier = x_BTD.grad_fn if isinstance(x_BTD.grad_fn, _Carry._backward_cls) else None
    if shard is not None:
        x_BTD = gather(x_BTD, shard.group)
    sums: tuple[torch.Tensor, torch.Tensor] = _LinearCrossEntropy.apply(
        x_BTD.flatten(0, 1), weight_VD, bias_V, labels_BT.flatten(), weights_BT.flatten(), softcap, terms, with_grad,
        carrier, plain, shard)
    return sums


def loss_of_logits(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, weights_BT: torch.Tensor,
                   terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of weight * cross-entropy and of weight * logsumexp(logits)^2 over the tokens: fp32 scalars.

    For models whose head is more than a matrix product. The softmax is computed in fp32. The first sum has the gradient
    of the loss with all `terms`; the second has none.
    """
    logits_BTV = logits_BTV.float()
    if terms.own is not None and logits_BTV.requires_grad:
        own_BT = terms.own(logits_BTV.flatten(0, 1), labels_BT.flatten()).view_as(labels_BT)
        return (own_BT * weights_BT).sum(), torch.zeros_like(weights_BT[0, 0])
    logs_BT = logits_BTV.logsumexp(-1)
    losses_BT = logs_BT - logits_BTV.gather(-1, labels_BT[..., None])[..., 0]
    loss = (losses_BT * weights_BT).sum()
    squares = (logs_BT.detach().square() * weights_BT).sum()
    if not loss.requires_grad or not (terms.label_smoothing or terms.z_loss):
        return loss, squares
    mean_losses_BT = logs_BT - logits_BTV.mean(-1)  # of all words
    extra_BT = terms.label_smoothing * (mean_losses_BT - losses_BT) + terms.z_loss * logs_BT.square()
    extra = (extra_BT * weights_BT).sum()
    return loss + (extra - extra.detach()), squares


def carry(x_BTD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None = None) -> torch.Tensor:
    """Return x as a tensor whose backward function also delivers the gradients of the weight and of the bias.

    This has an effect if `fused_linear_cross_entropy` is then called with the returned tensor and the same weight and
    bias. The output of a pipeline needs it. DeepSpeed 0.19.8 clears gradients and counts micro-steps when the gradient
    reaches this output (runtime/engine.py, _backward_prologue), so the parameters' gradients must not arrive earlier.
    """
    carried: torch.Tensor = _Carry.apply(x_BTD, weight_VD, bias_V)
    return carried


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_BTD: torch.Tensor, weight_VD: torch.Tensor,
                bias_V: torch.Tensor | None) -> torch.Tensor:
        ctx.gradients = (None, None)  # type: ignore[attr-defined]  # remain None if no loss used the weight
        return x_BTD.view_as(x_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dw_VD, db_V), ctx.gradients = ctx.gradients, (None, None)  # type: ignore[attr-defined]
        return grads[0], dw_VD, db_V


def _own_losses_(logits_CV: torch.Tensor, labels_C: torch.Tensor,
                 own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], softcap: float,
                 shard: VocabularyShard | None) -> torch.Tensor:
    """Return the user's losses [C], and overwrite the logits before the cap with their gradient.

    With a shard, each rank computes the losses of the complete vocabulary, and keeps the gradient of its words.
    """
    complete_CV = logits_CV if shard is None else shard.complete(logits_CV)
    leaf_CV = complete_CV.to(torch.promote_types(logits_CV.dtype, torch.float32), copy=True).requires_grad_()
    with torch.enable_grad():
        losses_C = own(torch.tanh(leaf_CV / softcap) * softcap if softcap else leaf_CV, labels_C)
        if losses_C.shape != labels_C.shape:
            raise ConfigError("--loss", found=f"losses of shape {list(losses_C.shape)}",
                              expected=f"one for each token, {list(labels_C.shape)}")
        gradient_CV, = torch.autograd.grad(losses_C.sum(), leaf_CV)
    logits_CV.copy_(gradient_CV if shard is None else gradient_CV[:, slice(*shard.words)])
    return losses_C.detach()


class _LinearCrossEntropy(torch.autograd.Function):
    """The operator. It saves dx without the tokens' weights, and dW and db with weights that sum to about _UNIT.

    Their sum is divided by a power of two, so that the division and its reversal in the backward pass round nothing.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x_ND: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None,
                labels_N: torch.Tensor, weights_N: torch.Tensor, softcap: float, terms: LossTerms, with_grad: bool,
                carrier: Any, plain: bool, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights_N = weights_N.to(torch.promote_types(x_ND.dtype, torch.float32))
        total = weights_N.sum().clamp(min=1e-30)  # 0 instead of NaN if all tokens are masked
        total /= total.frexp().mantissa  # the next power of two
        units_N = weights_N * (_UNIT / total)
        losses_N, squares = torch.empty_like(weights_N), torch.zeros_like(total)
        kernel = LOSS.choose(x_ND, plain=plain or shard is not None)
        tokens = CHUNK_TOKENS * (1 if shard is None else shard.group.size)
        if with_grad:
            dx_ND = torch.empty_like(x_ND)
            dw = kernel.no_gradient(weight_VD, weight_VD.dtype if len(x_ND) <= tokens else weights_N.dtype)
            db_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=weights_N.dtype)
        for start in range(0, len(x_ND), tokens):
            chunk = slice(start, start + tokens)
            logits_CV = F.linear(x_ND[chunk], weight_VD, bias_V)
            if terms.own is not None and with_grad:
                losses_N[chunk] = _own_losses_(logits_CV, labels_N[chunk], terms.own, softcap, shard)
            elif shard is None:
                losses_N[chunk], log_z_C = kernel.cross_entropy_(logits_CV, labels_N[chunk], with_grad=with_grad,
                                                                 softcap=softcap, terms=terms)
            else:
                losses_N[chunk], log_z_C = cross_entropy_over_shards_(
                    logits_CV, labels_N[chunk], shard, with_grad=with_grad, softcap=softcap,
                    label_smoothing=terms.label_smoothing, z_loss=terms.z_loss)
            if with_grad and terms.z_loss and terms.own is None:
                squares += torch.dot(log_z_C.square_(), weights_N[chunk])
            if with_grad:
                torch.mm(logits_CV, weight_VD, out=dx_ND[chunk])
                # the product is not kept in a variable, so that it is freed before the next chunk
                kernel.add_gradient(dw, logits_CV, (x_ND[chunk] * units_N[chunk, None]).to(x_ND.dtype))
                if db_V is not None:
                    db_V += torch.mv(logits_CV.t(), units_N[chunk].to(x_ND.dtype))
            del logits_CV  # free the memory before the next chunk
        if with_grad:
            dw = dw.to(weight_VD.dtype)
            ctx.save_for_backward(dx_ND, dw, db_V, weights_N, total)  # type: ignore[arg-type]  # it accepts None
            ctx.kernel = kernel  # type: ignore[attr-defined]
            ctx.bias_dtype = None if bias_V is None else bias_V.dtype  # type: ignore[attr-defined]
            ctx.carrier = carrier  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(squares)
        return torch.dot(losses_N, weights_N), squares

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0]
        dx_ND, dw, db_V, weights_N, total = ctx.saved_tensors  # type: ignore[attr-defined]
        dx_ND = (dx_ND * (weights_N * grad)[:, None]).to(dx_ND.dtype)
        scale = total * grad / _UNIT
        dw_VD = ctx.kernel.scaled_gradient(dw, scale)  # type: ignore[attr-defined]
        if db_V is not None:
            db_V = (db_V * scale).to(ctx.bias_dtype)  # type: ignore[attr-defined]
        if ctx.carrier is None:  # type: ignore[attr-defined]
            return dx_ND, dw_VD, db_V, *[None] * 8
        ctx.carrier.gradients = (dw_VD, db_V)  # type: ignore[attr-defined]
        return dx_ND, *[None] * 10


@functools.cache
def adds_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch adds products of this dtype to a matrix in fp32: not on CPUs (2.13), nor before 2.8."""
    x, total = torch.ones(8, 8, dtype=dtype, device=device), torch.zeros(8, 8, device=device)
    try:
        torch.addmm(total, x, x, out_dtype=total.dtype, out=total)
    except (TypeError, RuntimeError):
        return False
    return True


def _to_gradient_(p: torch.Tensor, labels: torch.Tensor, log_z: torch.Tensor, terms: LossTerms) -> None:
    """Overwrite the softmax with the gradient of the loss with respect to the capped logits."""
    if terms.z_loss:
        p.mul_(1 + 2 * terms.z_loss * log_z)
    if terms.label_smoothing:
        p.sub_(terms.label_smoothing / p.shape[1])
    p.scatter_add_(1, labels, torch.full_like(log_z, terms.label_smoothing - 1))
