"""Run each family forward and backward on a device that does not exist, with tensors that have no values.

    python -m tests.model.on_fake_device

A tensor on another device, a value that the host reads (.item(), bool(tensor)), or a shape that depends on values
raises an error: on a GPU the first one fails, and the others wait. This is a process of its own, because torch keeps
the device until the process ends.

Then the work of a block of some models is printed, as rows of pretrain/pages/measurements/gpu_operators.csv. It is
counted on tensors of the CPU without values, in fp32 and without the C functions, where attention is one operator, as
on CUDA. RMSNorm, which is one operator on CUDA only, is replaced.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.kernels.fused_loss import LossTerms
from pretrain.model.layer_specs import as_module
from pretrain.model.layers.block import Block
from pretrain.model.layers.rope import Rope
from pretrain.model.recompute import Recompute
from tests.support.model_shapes import SHAPES, write_config
from tests.support.operators import by_torch

DEVICE = "nodevice"
MODELS = ("gpt2", "llama", "neox_parallel", "gemma2")  # not those with ALiBi: the host reads its slopes, once
PRESETS = ("gpt2", "pythia-1.4b", "llama3-8b", "qwen3-8b", "gemma2-2b", "olmo2-7b")  # rows of the table
TOKENS = 4096  # of the micro-batch of a row
_COPIES = ("clone", "copy_", "_to_copy", "cat")
_NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "detach", "device", "sym_", "is_")


@dataclass
class Work(TorchDispatchMode):
    """Counts the operators that compute or copy: each is at least one kernel. Views and allocations are not counted."""

    operators: int = 0
    copies: int = 0
    moved: int = 0  # elements of all inputs and outputs of these operators

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema, name = func._schema, func._opname
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if is_view or name.startswith(_NO_KERNEL):
            return result
        self.operators += 1
        self.copies += name in _COPIES
        tensors = [x for x in tree_leaves([args, kwargs, result]) if torch.is_tensor(x)]
        self.moved += sum(x.numel() for x in {id(x): x for x in tensors}.values())
        return result


def run(config: ModelConfig, *, documents: bool, recompute: str, plain_operators: bool) -> None:
    """Compute a loss and its gradients, and check that all of them are on the device."""
    with torch.device(DEVICE):
        module = as_module(config, recompute=Recompute(part=recompute), plain_operators=plain_operators,
                           loss_terms=LossTerms(label_smoothing=0.1, z_loss=1e-4))
    tokens_BT = torch.zeros(2, 32, dtype=torch.int64, device=DEVICE)
    weights_BT = torch.ones(2, 32, dtype=torch.float32, device=DEVICE)
    loss = module(tokens_BT, tokens_BT, weights_BT, tokens_BT if documents else None)
    loss.backward()
    places = {loss.device.type, *(parameter.grad.device.type for parameter in module.parameters())}
    assert places == {DEVICE}, places


@torch.library.custom_op("counted::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Replaces torch's operator, without values."""
    return torch.empty_like(x)


@torch.library.custom_op("counted::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces the gradients of x and weight, without values."""
    return torch.empty_like(x), torch.empty_like(weight)


def replace_rms_norm() -> None:
    rms_norm.register_fake(lambda x, weight: torch.empty_like(x))
    rms_norm_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
    rms_norm.register_autograd(lambda ctx, grad: rms_norm_backward(grad, *ctx.saved_tensors),
                               setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    torch.nn.functional.rms_norm = lambda x, shape, weight, eps: rms_norm(x, weight)


def counted(function: Callable[[], Any]) -> Work:
    with Work() as work:
        function()
    return work


def row_of(name: str, config: ModelConfig) -> str:
    """Return the row of a model: the operators of a block's forward and backward pass."""
    config = replace(config, residual_dropout=0.0, attention_dropout=0.0)
    block = Block(config, config.blocks()[0], Rope(config) if config.position == "rope" else None)
    x_BTD = torch.zeros(1, TOKENS, config.hidden_size, requires_grad=True)
    block(x_BTD)  # makes the rotary tables
    outputs: list[torch.Tensor] = []
    forward = counted(lambda: outputs.append(block(x_BTD)))
    gradient = torch.zeros_like(outputs[0])
    backward = counted(lambda: outputs[0].backward(gradient))
    kb = 2 * (forward.moved + backward.moved) / TOKENS / 1000
    return f"{name},{forward.operators},{backward.operators},{forward.copies + backward.copies},{kb:.0f}"


def main() -> None:
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    setattr(getattr(torch, DEVICE), "get_amp_supported_dtype", lambda: [torch.bfloat16])  # noqa: B010 (for checkpoint)
    torch.set_default_dtype(torch.bfloat16)
    # one mode for all models, because tables and masks are cached; it rejects ordinary tensors
    with tempfile.TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=False):
        for name in MODELS:
            config = load_model_config(write_config(Path(folder), SHAPES[name]))
            for documents, recompute in ((False, "none"), (True, "blocks")):
                run(config, documents=documents, recompute=recompute, plain_operators=name == "gpt2")
    torch.set_default_dtype(torch.float32)
    replace_rms_norm()
    with by_torch(), FakeTensorMode():
        for name in PRESETS:
            print(row_of(name, load_model_config(name)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
