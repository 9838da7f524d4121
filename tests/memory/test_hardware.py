"""The devices that --gpu names."""

import pytest

from pretrain.errors import ConfigError
from pretrain.memory.hardware import GIB, find_gpu


@pytest.mark.parametrize(("text", "name"), [
    ("4090", "rtx4090"), ("RTX 3090", "rtx3090"), ("rtx-5090", "rtx5090"), ("A10", "a10"), ("gb300", "gb300")])
def test_cards_have_names_with_and_without_their_maker(text: str, name: str) -> None:
    assert find_gpu(text).name == name


def test_a_number_is_a_memory() -> None:
    assert find_gpu("512").memory_bytes == 512 * GIB


@pytest.mark.parametrize("text", ["4080", "513", "0", "-1", "inf"])
def test_a_number_that_is_no_memory_of_a_device_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--gpu: found {text}; expected .*, or a number of GiB up to 512"):
        find_gpu(text)
