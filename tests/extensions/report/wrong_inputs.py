"""Command lines of the subcommand, and wrong ones: see tests/wrong_inputs/case.py, commands.py and files.py."""

from tests.wrong_inputs.paths import IN_CHECKPOINT, STEP5

TOOLS = {"report": ["{world}/done"]}
PATHS = [(("report",), "RIGHT --output PATH", {"in a checkpoint": f"{STEP5}/x.html"}, IN_CHECKPOINT)]
READERS = [("run.json", "report", "--compare {world}/done {world}/broken", "broken/run.json")]
STORED = {"report": ("report {run} --output {run}.html", ("run.json", "metrics.jsonl", "events.jsonl")),
          "compare": ("report {run} {run} --compare", ("run.json", "metrics.jsonl")),
          "command": ("report {run} --command", ("run.json",))}
