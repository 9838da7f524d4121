"""Triton's kernels of attention, compiled for each compute capability: shared memory and registers are a GPU's."""

import json
import re
from pathlib import Path

import pytest

from tests.dry_gpu.conftest import DryGpu
from tests.dry_gpu.interpreted_attention import CASES
from tests.support.cases import config, flags

# CUDA C++ Programming Guide, "Technical specifications per compute capability": bytes of shared memory of one block
LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


@pytest.mark.slow
@pytest.mark.parametrize("capability", LIMITS)
def test_kernels_of_flex_attention_compile_and_fit(capability: int, dry_gpu: DryGpu, tmp_path: Path) -> None:
    """Forward and backward for all head sizes and kinds of masks (tests/gpu/test_kernels.py), without a fallback."""
    done = dry_gpu(["python", "-m", "pytest", "-q", "-m", "gpu", "-k", "flex", "tests/gpu/test_kernels.py"],
                   DRY_GPU_CAPABILITY=str(capability), TRITON_CACHE_DIR=str(tmp_path / "triton"),
                   TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    assert (done.returncode, "24 passed" in done.stdout) == (0, True), done.stdout[-3000:]
    kernels = [json.loads(path.read_text()) for path in (tmp_path / "triton").rglob("triton_*.json")]
    attention = [kernel for kernel in kernels if "flex_attention" in kernel["name"]]
    print(*sorted({f"{kernel['name']}: {kernel['shared']} bytes" for kernel in attention}), sep="\n")
    assert len(attention) >= 30  # forward and backward of 24 cases, of which some are equal
    assert {kernel["target"]["arch"] for kernel in kernels} == {capability}
    assert max(kernel["shared"] for kernel in kernels) <= LIMITS[capability]


@pytest.mark.slow
def test_kernels_of_flex_attention_compute_attention(dry_gpu: DryGpu, tmp_path: Path) -> None:
    """Triton's interpreter computes the kernels that inductor writes for the GPU; the reference is fp32 on the CPU."""
    done = dry_gpu(["python", "-m", "tests.dry_gpu.interpreted_attention"], TRITON_INTERPRET="1",
                   TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("errors:")]
    assert len(lines) == len(CASES), done.stdout[-3000:]
    assert max(float(error) for line in lines for error in line) < 1e-3, lines


@pytest.mark.slow
def test_a_kernel_with_too_much_shared_memory_is_not_used(dry_gpu: DryGpu, corpus: str, tmp_path: Path) -> None:
    """Capability 8.6 has 99 KiB, and the backward kernel for heads of 256 elements needs more."""
    (tmp_path / "ds.json").write_text(json.dumps(config(1, precision="bf16", micro=2)))
    own = {**flags(corpus, steps=2, seq_length=128), "document_attention": "true",
           "model_overrides": "vocab_size=256,n_layer=2,n_embd=256,n_head=1"}
    done = dry_gpu(["python", "-m", "pretrain", "--num_accelerators=1", f"--deepspeed_config={tmp_path / 'ds.json'}",
                    f"--save={tmp_path / 'run'}", *(f"--{name}={value}" for name, value in own.items())],
                   DRY_GPU_CAPABILITY="86")
    reason = re.search(r"no flex_attention: its kernel failed: .*out of resource: \w+ Required: (\d+)", done.stdout)
    assert reason, done.stdout[-3000:]
    assert int(reason[1]) > 99 << 10
    assert "finished 2 steps" in done.stdout
