"""The device of a rank: which operators can be compiled for it, and whether each rank has one."""

import math
import re
import stat
from pathlib import Path

import pytest
import torch

from pretrain.distributed import device
from pretrain.distributed.device import compiles_cuda, cuda_device, detect_device, why_not_nvcc
from pretrain.distributed.own_gpu import check_device_index, open_gpu, require_computing
from pretrain.distributed.print_error import run_or_reject
from pretrain.distributed.world import ALONE, World
from pretrain.errors import CRASHED, ConfigError


def install_nvcc(home: Path, monkeypatch: pytest.MonkeyPatch, *, release: str, torch_version: str) -> None:
    """Install a program that answers `nvcc --version`, and let torch be a build for `torch_version`."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'nvcc: NVIDIA (R) Cuda compiler driver'\n"
                    f"echo 'Cuda compilation tools, release {release}, V{release}.93'\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IEXEC)
    (home / "include").mkdir()
    for name in device._CUDA_HEADERS:
        (home / "include" / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.delenv("DS_SKIP_CUDA_CHECK", raising=False)
    monkeypatch.setattr(device, "_torch_cuda_version", lambda: torch_version)


@pytest.mark.parametrize(("release", "torch_version", "fits"), [
    ("12.8", "12.8", True), ("12.4", "12.8", True), ("11.8", "12.8", False), ("13.0", "13.0", True),
    ("13.1", "13.0", False), ("12.8", "", True)])
def test_nvcc_must_be_of_the_cuda_version_of_torch(release, torch_version, fits, tmp_path, monkeypatch):
    """DeepSpeed accepts the same pairs of versions (ops/op_builder/builder.py, assert_no_cuda_mismatch)."""
    install_nvcc(tmp_path, monkeypatch, release=release, torch_version=torch_version)
    assert compiles_cuda() == fits
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert compiles_cuda()


def test_deepspeed_judges_versions_in_the_same_way(tmp_path, monkeypatch):
    import torch.utils.cpp_extension
    from deepspeed.ops.op_builder import builder

    for number, (release, torch_version) in enumerate((("12.4", "12.8"), ("11.8", "12.8"), ("13.1", "13.0"))):
        install_nvcc(tmp_path / str(number), monkeypatch, release=release, torch_version=torch_version)
        monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path / str(number)))
        monkeypatch.setattr(torch.version, "cuda", torch_version)
        try:
            accepted = builder.assert_no_cuda_mismatch()
        except builder.CUDAMismatchException:
            accepted = False
        assert compiles_cuda() == accepted


@pytest.mark.parametrize("name", device._CUDA_HEADERS)
def test_a_toolkit_without_a_header_compiles_nothing(name: str, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a stand-in for nvcc and empty headers. Conda has the real ones in targets/NAME/include."""
    install_nvcc(tmp_path, monkeypatch, release="12.8", torch_version="12.8")
    assert compiles_cuda()
    assert f"#include <{name}>" in _headers_of_torch()
    (tmp_path / "include" / name).unlink()
    assert why_not_nvcc() == f"the CUDA toolkit has no {name}"
    (tmp_path / "targets/x86_64-linux/include").mkdir(parents=True)
    (tmp_path / "targets/x86_64-linux/include" / name).touch()
    assert compiles_cuda()


def _headers_of_torch() -> str:
    import torch

    return (Path(torch.__file__).parent / "include/ATen/cuda/CUDAContextLight.h").read_text()


def test_without_nvidia_smi_the_run_is_for_another_machine(monkeypatch):
    monkeypatch.setattr(device, "nvidia_smi", lambda fields: [])
    assert cuda_device().compiles
    monkeypatch.setattr(device, "nvidia_smi", lambda fields: ["9.0, 143771"])
    monkeypatch.setattr(device, "has_nvcc", lambda: False)
    found = cuda_device()
    assert (found.compiles, found.memory_bytes) == (False, 143771 * 2**20)


A100, A30, H100 = "8.0, 81920, GPU-a1, NVIDIA A100", "8.0, 24576, GPU-a2, NVIDIA A30", "9.0, 81920, GPU-h1, NVIDIA H100"


@pytest.mark.parametrize(("visible", "gpus", "memory_gib", "capability", "kinds"), [
    (None, [A100, A100], 80, 8, 0), ("1", [A100, A30], 24, 8, 2), ("GPU-a1", [A100, A30], 80, 8, 0),
    ("GPU-h", [A100, H100], 80, 9, 0), ("0,1", [H100, A30], 24, 8, 2), ("MIG-x", [H100], 0, 9, 0),
    ("0,-1,7", [H100, H100], 80, 9, 0), ("3", [], 0, math.inf, 0)])
def test_a_run_is_planned_for_the_weakest_visible_gpu(visible, gpus, memory_gib, capability, kinds, monkeypatch):
    """CUDA and nvidia-smi number GPUs of different kinds differently; then all of them count."""
    monkeypatch.setattr(device, "nvidia_smi", lambda fields: gpus)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = cuda_device()
    assert (found.memory_bytes, found.capability, len(found.kinds)) == (memory_gib * 2**30, capability, kinds)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert len(cuda_device().kinds) == (2 if visible == "0,1" else 0)


@pytest.mark.parametrize("visible", ["2", "0,2", "GPU-x", "GPU-a", "GPU-a1,GPU-a1", "0,0"])
def test_visible_devices_that_cuda_would_not_see_are_rejected(visible, monkeypatch):
    monkeypatch.setattr(device, "nvidia_smi", lambda fields: [A100, A30])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=f"^CUDA_VISIBLE_DEVICES: found '{visible}'; expected "):
        cuda_device()


@pytest.mark.parametrize("chosen", ["cuda", None])
def test_torch_for_rocm_is_rejected_and_not_replaced_by_the_cpu(chosen, monkeypatch):
    monkeypatch.setattr(device, "_torch_built_for", {"hip": "6.4.43482", "cuda": "None"}.__getitem__)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/kfd")
    monkeypatch.setenv("DS_ACCELERATOR", chosen or "")
    with pytest.raises(ConfigError, match="torch: this is a build for AMD's ROCm"):
        detect_device()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert detect_device().kind == "cpu"


@pytest.mark.parametrize(("failing", "text", "visible", "line"), [
    ("init", "driver is too old (found version 12080). Please", "0", "NVIDIA driver: it supports CUDA up to 12.8, and"),
    ("init", "No CUDA GPUs are available", "", "CUDA: No CUDA GPUs are available."),
    ("init", "No CUDA GPUs are available", "MIG-x", "CUDA_VISIBLE_DEVICES: CUDA finds no device of 'MIG-x'"),
    ("set_device", "CUDA error: out of memory", "MIG-x", "GPU MIG-x: its memory is full before the run begins"),
    ("set_device", "CUDA error: an illegal address\nmore", "", "GPU 0: CUDA error: an illegal address."),
])
def test_a_gpu_that_torch_cannot_open_is_one_line(failing, text, visible, line, monkeypatch):
    """The errors of torch itself are in tests/dry_gpu/test_machines.py."""
    import torch

    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, failing, fail)
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        open_gpu(ALONE)


@pytest.mark.parametrize(("launcher", "remedy"), [("slurm", "--gpus-per-node"), ("torch", "CUDA_VISIBLE_DEVICES")])
def test_a_rank_without_a_gpu_of_its_own_is_rejected(launcher, remedy):
    world = World(rank=5, size=8, local_rank=1, local_size=4, launcher=launcher)
    check_device_index(world, 2)
    with pytest.raises(ConfigError, match=r"found 1 devices for rank 1 of this host; expected at least 2") as error:
        check_device_index(world, 1)
    assert remedy in str(error.value)


def failing(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nand more")


@pytest.mark.parametrize(("arange", "problem"), [
    (lambda *_, **__: torch.zeros(1000), "the device computes nothing: the sum of 0 to 999 is 0."),
    (lambda *_, **__: torch.ones(1000), "the device computes wrongly: the sum of 0 to 999 is 1000."),
    (failing, "it cannot add numbers: CUDA error: no kernel image is available for execution on the device."),
])
def test_a_gpu_that_computes_nothing_ends_a_program_in_one_line(arange, problem, monkeypatch, capsys):
    monkeypatch.setattr(torch, "arange", arange)
    assert run_or_reject(lambda _: require_computing(3)) == CRASHED
    error = capsys.readouterr().err
    assert error.startswith("ds-pretrain: error: GPU 3 of ")
    assert problem in error
    assert error.count("\n") == 1
