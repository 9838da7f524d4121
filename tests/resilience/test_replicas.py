"""The checksum of a tensor's bits."""

import pytest
import torch

from pretrain.engine import checksums
from pretrain.engine.checksums import checksum

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 4, 11])
def test_every_flipped_bit_changes_the_checksum(size: int, offset: int, dtype: torch.dtype) -> None:
    """Also in tensors whose size or address is no multiple of 8 bytes."""
    tensor = torch.randn(size + offset, generator=torch.Generator().manual_seed(0)).to(dtype)[offset:]
    bits, before = tensor.view(INTEGERS[dtype]), int(checksum(tensor))
    found = set()
    for at in range(size):
        for bit in range(8 * tensor.element_size()):
            mask = torch.tensor([1], dtype=bits.dtype) << bit
            bits[at:at + 1] ^= mask
            found.add(int(checksum(tensor)))
            bits[at:at + 1] ^= mask
    assert before not in found
    assert int(checksum(tensor)) == before


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_checksum_does_not_depend_on_the_address(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_CHUNK_WORDS", 2)
    values = torch.randn(8, 5).to(dtype)
    moved = torch.empty(41, dtype=dtype)[1:].view(8, 5).copy_(values)
    assert moved.storage_offset() == 1
    assert int(checksum(moved)) == int(checksum(values))
    values[0, 0] = float("nan")
    assert int(checksum(moved)) != int(checksum(values))
