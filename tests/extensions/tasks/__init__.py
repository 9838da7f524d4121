"""Tests of scores and texts of the model inside a run."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
