"""Kernels that run on CPUs alone, allowed in unlogged steps: see tests/distributed/test_metrics.py."""

ALLOWED = ("extensions/cpu_kernels/",)
