"""Tests of the planner."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
