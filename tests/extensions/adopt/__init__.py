"""Tests of the extension adopt."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
