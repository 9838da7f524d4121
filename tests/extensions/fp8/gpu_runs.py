"""Runs on GPUs: see tests/dry_gpu/test_runs.py."""

from tests.dry_gpu.kinds import Kind, bf16

KINDS = {
    "FP8 by tensor": Kind(bf16(1), {"fp8": "tensorwise"}, capability=89),
    "FP8 by row, compiled, ZeRO-3": Kind(bf16(3), {"fp8": "rowwise", "compile_blocks": "true"}, 2, capability=89),
}
