"""Operators of the model by torch alone, whatever extensions offer (pretrain/model/operators.py)."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from pretrain.memory.estimate.phases import layer_bytes, layer_groups
from pretrain.model import operator_memory
from pretrain.model.kernels.activation import ACTIVATION
from pretrain.model.kernels.fused_loss import LOSS
from pretrain.model.kernels.linear import LINEAR
from pretrain.model.kernels.norm import NORM
from pretrain.model.kernels.torch_attention import ATTENTION
from pretrain.model.operators import Operator, all_kernels


@contextlib.contextmanager
def by_torch(*operators: Operator) -> Iterator[None]:
    """Compute these operators by torch's operators; without arguments all, and estimate their memory."""
    all_kernels()
    with contextlib.ExitStack() as stack:
        if not operators:
            stack.callback(forget_estimates)
            stack.enter_context(patch.object(operator_memory, "_offered", tuple))
            forget_estimates()
        for operator in operators or (NORM, LINEAR, ACTIVATION, ATTENTION, LOSS):
            stack.enter_context(patch.object(operator, "offers", []))
        yield


def forget_estimates() -> None:
    """Forget the estimated bytes of layers, which depend on what computes the operators."""
    for function in (layer_groups, layer_bytes):
        function.cache_clear()
