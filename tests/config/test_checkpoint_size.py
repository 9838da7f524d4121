"""Size of a checkpoint: bytes per parameter of master weights, optimizer states and weights."""

from pretrain.config.checkpoint_size import checkpoint_bytes
from pretrain.config.layout import Layout


def test_checkpoint_bytes() -> None:
    assert checkpoint_bytes(Layout(zero_stage=1, precision="fp16"), 100) == 100 * (4 + 8 + 2)
    assert checkpoint_bytes(Layout(zero_stage=3), 100) == 100 * (4 + 8)
