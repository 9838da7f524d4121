"""A layer computed in tiles: pieces of the sequences, one after the other.

The backward pass recomputes each tile, so that the inner tensors of only one tile exist at a time. For an MLP on very
long sequences, they would take more memory than all the rest (ALST: Bekman et al., arXiv 2506.13996).

DeepSpeed 0.19.8's TiledMLP (runtime/sequence_parallel/ulysses_sp.py) is not used. It runs autograd inside of its
backward function, so that hooks on a weight's gradient, such as those of --noise_scale_interval, see a gradient for
each tile instead of their sum. Here autograd itself sums the gradients of the tiles.

Shapes: B batch, T positions, D hidden size, n positions of a tile.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint


def in_tiles(layer: Callable[[torch.Tensor], torch.Tensor], x_BTD: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return layer(x), computed in at most `tiles` pieces of B * T positions. The layer maps each position by itself.

    It must not draw random numbers: their state is not restored.
    """
    if tiles == 1:
        return layer(x_BTD)
    outputs = [_tile(layer, x_1nD) for x_1nD in x_BTD.reshape(1, -1, x_BTD.shape[-1]).chunk(tiles, dim=1)]
    return torch.cat(outputs, dim=1).view(x_BTD.shape)


def _tile(layer: Callable[[torch.Tensor], torch.Tensor], x_1nD: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return layer(x_1nD)
    output_1nD: torch.Tensor = checkpoint(layer, x_1nD, use_reentrant=False, preserve_rng_state=False)
    return output_1nD
