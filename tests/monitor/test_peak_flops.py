"""Peak FLOP/s by the name of the device, and by the precision of the matrix products of a run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.distributed.device import peak_tflops
from pretrain.monitor import training_row


@pytest.mark.parametrize(("name", "precision", "expected"), [
    ("NVIDIA H200", "bf16", 989.0), ("NVIDIA H100 PCIe", "bf16", 756.0), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
    ("NVIDIA A10G", "bf16", 70.0), ("NVIDIA H100 NVL", "fp16", 835.0), ("NVIDIA GH200 480GB", "bf16", 989.0),
    ("NVIDIA GB200", "bf16", 2500.0), ("NVIDIA B200", "tf32", 1100.0), ("NVIDIA L4", "tf32", 60.0),
    ("NVIDIA RTX A1000", "bf16", None), ("NVIDIA T400", "fp16", None),
    ("NVIDIA GeForce RTX 4090", "bf16", 165.2), ("NVIDIA GeForce RTX 4090 D", "bf16", 147.1),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None), ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
    ("a device that is not in the table", "bf16", None)])
def test_peak_flops_of_a_device(name: str, precision: str, expected: float | None) -> None:
    assert peak_tflops(name, precision) == expected


@pytest.mark.parametrize(("precision", "tf32", "expected"), [
    ("fp32", False, 67.0), ("fp32", True, 494.5), ("bf16", False, 989.0), ("fp16", False, 989.0)])
def test_mfu_divides_by_the_peak_of_the_products(monkeypatch: pytest.MonkeyPatch, precision: str, tf32: bool,
                                                 expected: float) -> None:
    """Mocked, because it is the same on machines without a GPU: the device and its name."""
    monkeypatch.setattr(training_row, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    plan: Any = SimpleNamespace(args=SimpleNamespace(peak_tflops=None, tf32=tf32),
                                layout=SimpleNamespace(precision=precision))
    assert training_row.device_peak_tflops(plan) == expected
