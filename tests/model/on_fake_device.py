"""Run each family forward and backward on a device that does not exist, with tensors that have no values.

    python -m tests.model.on_fake_device

A tensor on another device, a value that the host reads (.item(), bool(tensor)), or a shape that depends on values
raises an error: on a GPU the first one fails, and the others wait. One line per model is printed. This is a process of
its own, because torch keeps the device until the process ends.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from pretrain.model.config import ModelConfig, load_model_config
from pretrain.model.kernels.fused_loss import LossTerms
from pretrain.model.layer_specs import as_module
from pretrain.model.recompute import Recompute
from tests.support.model_shapes import SHAPES, write_config

DEVICE = "nodevice"
MODELS = ("gpt2", "llama", "neox_parallel", "gemma2")  # not those with ALiBi: the host reads its slopes, once


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
            print(name, flush=True)


if __name__ == "__main__":
    sys.exit(main())
