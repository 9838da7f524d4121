"""Peak FLOP/s by the name of the device."""

import pytest

from pretrain.monitor.peak_flops import peak_tflops


@pytest.mark.parametrize(("name", "precision", "expected"), [
    ("NVIDIA H200", "bf16", 989.0), ("NVIDIA H100 PCIe", "bf16", 756.0), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
    ("NVIDIA A10G", "bf16", 70.0), ("a device that is not in the table", "bf16", None)])
def test_peak_flops_of_a_device(name: str, precision: str, expected: float | None) -> None:
    assert peak_tflops(name, precision) == expected
