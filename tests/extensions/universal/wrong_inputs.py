"""Valid command lines, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

from tests.wrong_inputs.paths import IN_CHECKPOINT, NAME, NO_FOLDER, STEP5, USED_FOLDER

TOOLS = {"checkpoint convert": ["{world}/done", "{world}/out"]}
PATHS = [(("checkpoint convert",), "PATH REST", NO_FOLDER, NAME),
         (("checkpoint convert",), "{world}/done PATH", USED_FOLDER, NAME),
         (("checkpoint convert",), "{world}/done PATH", {"in a checkpoint": f"{STEP5}/x"}, IN_CHECKPOINT)]
LINES = [
    *(("export", f"RIGHT --format universal {flag}", f"{flag.split()[0]}: --format universal has no such choice", {})
      for flag in ("--dtype bf16", "--shard_size 1", "--tokenizer {world}")),
    ("export", "{world}/done --format trainer --output {world}/checkpoint-7",
     "--output: checkpoint-7 is the name of step 7, and the checkpoint is of step 5", {})]
