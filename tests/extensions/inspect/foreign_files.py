"""Files of a foreign run and of data, and the commands that read them: see tests/foreign_files/commands.py."""

from typing import Any

READERS = {"run": {"metrics.jsonl": ("step",), "events.jsonl": ("step",)}}
WITHOUT_DATA = {("inspect", "step", "RUN", "2"): False}


def commands(world: Any) -> dict[str, dict[str, list[str]]]:
    """Return name of FILES -> name -> words."""
    return {"run": {"step": ["inspect", "step", str(world.run), "2"]},
            "data": {"documents": ["inspect", "documents", f"{world.data}/corpus"]}}
