"""Reads of the gradient norm of the step before, allowed in unlogged steps: see tests/distributed/test_metrics.py."""

ALLOWED = ("extensions/host_time/",)
