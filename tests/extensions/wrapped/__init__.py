"""Tests of wrapped decoders of transformers."""

from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
