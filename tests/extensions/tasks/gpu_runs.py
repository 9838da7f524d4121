"""Flags of a run on GPUs: see tests/dry_gpu/test_runs.py."""

FLAGS_OF_TEXT = {"show_predictions": 2}
