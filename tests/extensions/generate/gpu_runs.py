"""The subcommand on the dry GPU: see tests/dry_gpu/test_runs.py."""

from tests.dry_gpu.kinds import NOTHING, RUN

COMMANDS = {"generate": (["generate", RUN, "--prompt", "4 of", "--max_new_tokens", "5"], (0, "4 of"), (1, NOTHING))}
