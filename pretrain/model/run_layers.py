"""Apply a list of layers, and recompute some of them in the backward pass, with their inputs perhaps in host memory.

All recomputation is non-reentrant (torch.utils.checkpoint with use_reentrant=False). It restores the state of the
random generators, so that dropout has the same masks. It ends as soon as the last tensor that the backward pass needs
is computed.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pretrain.model.kernels.documents import Documents
from pretrain.model.layers.block import Block
from pretrain.model.layers.vocabulary import PositionEmbedding
from pretrain.model.recompute import Recompute

Layer = Callable[..., torch.Tensor]  # the last layer also accepts Labels


def run_layers(layers: list[Layer], x: torch.Tensor, documents: Documents | None,
               recompute: Recompute) -> torch.Tensor:
    """Apply the layers in turn. Groups of layers that are recomputed keep only their input."""
    if not torch.is_grad_enabled():
        return _run(layers, x, documents)
    offload = HostOffload() if recompute.offload else None
    for group, is_recomputed in _groups(layers, recompute):
        if not is_recomputed:
            x = _run(group, x, documents)
            continue
        with offload.hooks(x) if offload is not None else contextlib.nullcontext():
            x = checkpoint(_run, group, x, documents, use_reentrant=False)
    return x


def _groups(layers: list[Layer], recompute: Recompute) -> Iterator[tuple[list[Layer], bool]]:
    """Divide the layers into groups, each with whether it is recomputed.

    A group without a block is not recomputed: embeddings, norm and head save little more than their outputs. A block
    has an attribute `recompute`, what is recomputed of it.
    """
    size = recompute.interval or (1 if recompute.part == "blocks" else max(1, len(layers)))
    for start in range(0, len(layers), size):
        group = layers[start : start + size]
        parts = [getattr(layer, "recompute") for layer in group if hasattr(layer, "recompute")]  # noqa: B009 (mypy)
        yield group, bool(parts) and (recompute.interval > 0 or parts[0] == "blocks")


def _run(layers: list[Layer], x: torch.Tensor, documents: Documents | None) -> torch.Tensor:
    """Apply the layers in turn. Learned positions and blocks depend on the documents, if there are any."""
    for layer in layers:
        if documents is None or not isinstance(layer, (PositionEmbedding, Block)):
            x = layer(x)
            continue
        if isinstance(layer, Block) and layer.is_compiled:
            layer.attention.prepare(documents, x)
        x = layer(x, documents=documents)  # by name: ZeRO-3's hooks accept only tensors among the other arguments
    return x


class HostOffload:
    """Keeps the inputs of recomputed groups in host memory, for one forward pass of a micro-batch.

    torch.autograd.graph.save_on_cpu does the same, but lets the host wait for each copy to the host memory, and begins
    a copy to the device only when the backward pass needs the tensor.

    On CUDA, the host memory is pinned, and the copies run on a stream of their own, in parallel with the computation.
    In the backward pass, the next group's input is copied back while a group is computed. On a CPU both memories are
    the same; the copies are made all the same, so that tests run this code.
    """

    def __init__(self) -> None:
        self._latest: _HostCopy | None = None

    def hooks(self, x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch's checkpoint keeps its input `x` in host memory.

        Token ids are not worth a copy. A leaf is the input that a pipeline stage received: DeepSpeed 0.19.8 keeps it on
        the device until the backward pass (runtime/pipe/engine.py, pipe_buffers).
        """
        if x.is_leaf or not x.is_floating_point():
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _HostCopy.take)

    def _pack(self, tensor: torch.Tensor) -> "_HostCopy":
        self._latest = _HostCopy(tensor.detach(), self._latest)
        return self._latest


class _HostCopy:
    """A tensor in host memory. `previous` was copied before it, and is needed after it in the backward pass."""

    def __init__(self, tensor: torch.Tensor, previous: "_HostCopy | None") -> None:
        self.copies, self.previous = _copies_of(tensor.device), previous
        self.on_device: torch.Tensor | None = None
        self.on_host = self.copies.to_host(tensor)

    def fetch(self) -> None:
        """Begin to copy the tensor back to the device."""
        if self.on_device is None:
            self.on_device = self.copies.to_device(self.on_host)

    def take(self) -> torch.Tensor:
        """Return the tensor on its device, and begin to copy the tensor that the backward pass needs next."""
        self.fetch()
        tensor, self.on_device = self.on_device, None
        assert tensor is not None
        self.copies.wait(tensor)
        if self.previous is not None and self.copies.stream is not None:
            self.previous.fetch()
        self.previous = None
        return tensor


class _Copies:
    """Copies between a device and host memory, on a stream of their own. On a CPU they are ordinary copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to pinned host memory, after the computations that are queued already."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.stream is not None)
        if self.stream is None:
            return host.copy_(tensor)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # its memory is not used again before the copy has ended
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the device, after the copies that are queued already."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            return torch.empty_like(host, device=self.device).copy_(host, non_blocking=self.stream is not None)

    def wait(self, tensor: torch.Tensor) -> None:
        """Let the computation wait for the copies that are queued, before it reads the tensor."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            tensor.record_stream(current)


@lru_cache
def _copies_of(device: torch.device) -> _Copies:
    return _Copies(device)
