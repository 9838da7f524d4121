"""The flight record and a replay of a foreign run: see tests/foreign_files/commands.py."""

import json
from pathlib import Path

FILES: dict[str, dict[str, tuple[str, ...]]] = {"run": {
    "replays/step_2/verdict.json": (), "flight/start_0/rank_0.jsonl": ("summary",)}}
RUN_FLAGS = {"flight_interval": 1}
PLACES = ("replay",)


def write_in_run(run: Path) -> None:
    """Write the result of a replay."""
    result = {"run": str(run), "step": 2, "time": 1.0, "notes": ["a note"], "checkpoint": None, "replays": [],
               "verdict": {"kind": "reproducible", "certainty": "sure", "reasons": ["x"], "remedy": "x", "also": []},
               "samples": {"command": "ds-pretrain", "lines": ["samples:  x"]}}
    (run / "replays/step_2").mkdir(parents=True)
    (run / "replays/step_2/verdict.json").write_text(json.dumps(result))
