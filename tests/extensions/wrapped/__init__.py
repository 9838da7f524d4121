"""Tests of the flight record, of recomputation and of wrappeds."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
