"""The subcommand on the dry GPU: see tests/dry_gpu/test_runs.py."""

from tests.dry_gpu.kinds import NEW, NOTHING

COMMANDS = {"quickstart": (["quickstart", NEW], (0, "a sample"), (1, NOTHING))}
