"""Runs on GPUs: see tests/dry_gpu/test_runs.py."""

from tests.dry_gpu.kinds import Kind, bf16

KINDS = {"profiles": Kind(bf16(2), {"profile_steps": "2:3", "memory_snapshot": "true"}, 2),
         "timeline": Kind(bf16(1, stages=2), {"pipeline_timeline": "2:3", "profile_steps": "2:3"}, 2)}
