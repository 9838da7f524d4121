"""The subcommand on GPUs: see tests/dry_gpu/test_runs.py."""

from tests.dry_gpu.kinds import NEW, RUN

COMMANDS = {"average": (["average", RUN, "--last=2", "--output", NEW], (0, ""), (0, ""))}
