"""Files of a foreign run, and the commands that read them: see tests/foreign_files/commands.py."""

from typing import Any

_REPORT = ("report",)
READERS = {"run": {
    "metrics.jsonl": ("report", "compare"), "events.jsonl": ("report", "compare"), "predictions.jsonl": _REPORT,
    "rank_times.jsonl": _REPORT, "rollbacks.jsonl": _REPORT, "restarts.jsonl": _REPORT,
    "replays/step_2/verdict.json": _REPORT, "flight/start_0/rank_0.jsonl": _REPORT}}
WITHOUT_DATA = {("report", "RUN", "--output", "page.html"): True, ("report", "RUN", "--command"): True}


def commands(world: Any) -> dict[str, dict[str, list[str]]]:
    """Return name of FILES -> name -> words."""
    run = str(world.run)
    return {"run": {"report": ["report", run, "--output", f"{world.out}/page.html"],
                    "compare": ["report", run, str(world.own), "--compare"], "command": ["report", run, "--command"]}}
