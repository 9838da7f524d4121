"""A valid command line of the subcommand, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

from tests.wrong_inputs.paths import IN_CHECKPOINT, NAME, NO_FOLDER, STEP5, USED_FOLDER_OR_STEP

TOOLS = {"average": ["{world}/done", "--last", "2", "--output", "{world}/out"]}
PATHS = [(("average",), "RIGHT --output PATH", {"in a checkpoint": f"{STEP5}/x.html"}, IN_CHECKPOINT),
         (("average",), "PATH REST", NO_FOLDER, NAME),
         (("average",), "RIGHT --output PATH", USED_FOLDER_OR_STEP, NAME)]
STORED = {"average": ("average {run} --last 2 --output {run}-out", ("checkpoints/global_step3/manifest.json",))}
