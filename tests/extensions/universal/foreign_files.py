"""Files of a foreign checkpoint, and the command that reads them: see tests/foreign_files/commands.py."""

from typing import Any

READERS = {"run": {"checkpoints/global_step4/manifest.json": ("convert",),
                   "checkpoints/global_step4/shard_index_rank_00000.json": ("convert",)}}


def commands(world: Any) -> dict[str, dict[str, list[str]]]:
    """Return name of FILES -> name -> words."""
    return {"run": {"convert": ["checkpoint", "convert", str(world.run), f"{world.out}/converted"]}}
