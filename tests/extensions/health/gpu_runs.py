"""The subcommand on GPUs: see tests/dry_gpu/test_runs.py."""

_FOUND = (1, "6 of 6 matrix products")
COMMANDS = {"check-cluster": (["check-cluster", "--product_size=512", "--memory_mib=64"], _FOUND, _FOUND)}
