"""The subcommands on GPUs: see tests/dry_gpu/test_runs.py."""

from tests.dry_gpu.kinds import FLAGS, NOTHING

COMMANDS = {"sanity": (["sanity", *FLAGS], (1, NOTHING), (1, NOTHING)),
            "find-lr": (["find-lr", *FLAGS, "--steps=3"], (1, "the loss did not fall"), (1, NOTHING))}
