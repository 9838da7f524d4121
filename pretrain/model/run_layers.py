"""Apply a list of layers, and recompute some of them in the backward pass.

All recomputation is non-reentrant (torch.utils.checkpoint with use_reentrant=False). It restores the state of the
random generators, so that dropout has the same masks. It ends as soon as the last tensor that the backward pass needs
is computed.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.utils.checkpoint import checkpoint

from pretrain.model.host_offload import HostOffload
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

    A group without a block is not recomputed: embeddings, norm and head save little more than their outputs.
    """
    size = recompute.interval or (1 if recompute.part == "blocks" else max(1, len(layers)))
    for start in range(0, len(layers), size):
        group = layers[start : start + size]
        blocks = [layer for layer in group if isinstance(layer, Block)]
        yield group, bool(blocks) and (recompute.interval > 0 or blocks[0].recompute == "blocks")


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
