"""Runs and the subcommand on GPUs: see tests/dry_gpu/test_runs.py."""

from tests.dry_gpu.kinds import NEW, NOTHING, RUN, Kind, bf16

DETERMINISTIC = {"recompute_interval": 2}  # each micro-batch that is computed again has the same bits
FLAGS_OF_TEXT = {"flight_interval": 1}
KINDS = {"deterministic recomputation": Kind(bf16(1), {"deterministic": "true", "recompute_interval": 2}, 2),
         "flight record": Kind(bf16(1), {"flight_interval": 2}, 2),
         "flight record at ZeRO-3": Kind(bf16(3), {"flight_interval": 1}, 2)}
COMMANDS = {"replay": (["replay", f"{RUN}@3", "--output", NEW], (0, ""), (2, NOTHING))}
