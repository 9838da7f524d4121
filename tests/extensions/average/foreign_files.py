"""The manifest of a foreign checkpoint, and the command that reads it: see tests/foreign_files/commands.py."""

from typing import Any

READERS = {"run": {"checkpoints/global_step4/manifest.json": ("average",)}}


def commands(world: Any) -> dict[str, dict[str, list[str]]]:
    """Return name of FILES -> name -> words."""
    return {"run": {"average": ["average", str(world.run), "--last", "2", "--output", f"{world.out}/averaged"]}}
