"""Tests of the sanity checks, and of the search for a learning rate."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
