"""The devices that --gpu names."""

import pytest

from pretrain.errors import ConfigError
from pretrain.memory.hardware import GIB, find_gpu


@pytest.mark.parametrize(("text", "gib"), [("4090", 24), ("RTX 3090", 24), ("rtx-5090", 32), ("a10", 24), ("24", 24),
                                           ("512", 512)])
def test_cards_and_numbers_are_known_by_their_memory(text: str, gib: int) -> None:
    assert find_gpu(text).memory_bytes == gib * GIB


@pytest.mark.parametrize("text", ["4080", "513", "0", "-1", "inf"])
def test_a_number_that_is_no_memory_of_a_device_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--gpu: found {text}; expected a number of GiB above 0, and at most 512"):
        find_gpu(text)
