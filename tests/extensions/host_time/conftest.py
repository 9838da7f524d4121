"""The fixture of dry GPUs, for test_waits.py."""

from tests.dry_gpu.conftest import dry_gpu

__all__ = ["dry_gpu"]
