"""A foreign ladder.json, and the command that reads it: see tests/foreign_files/commands.py."""

from typing import Any

FILES: dict[str, dict[str, tuple[str, ...]]] = {"ladder": {"ladder-right.json": ()}}
PLACES = ("expected_curve",)


def commands(world: Any) -> dict[str, dict[str, list[str]]]:
    """Return name of FILES -> name -> words."""
    return {"ladder": {"check": ["check", *world.flags(
        expected_curve=f"{world.data}/ladder-right.json", deepspeed_config=f"{world.data}/ds.json",
        model_overrides="", train_data=f"{world.data}/corpus", seq_length="64")]}}
