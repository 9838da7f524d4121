"""Command lines of the subcommands, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

from tests.wrong_inputs.paths import NAME, NO_DATA, NO_FOLDER

TOOLS = {"inspect documents": ["{world}/corpus"], "inspect step": ["{world}/done", "1"]}
PATHS = [(("inspect step",), "PATH REST", NO_FOLDER, NAME), (("inspect documents",), "PATH", NO_DATA, NAME)]
STORED = {"inspect step": ("inspect step {run} 2", ("checkpoints/global_step3/manifest.json", "run.json",
                                                    "metrics.jsonl", "events.jsonl"))}
