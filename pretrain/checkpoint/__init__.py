"""Sharded checkpoints: written and read by the DeepSpeed engine, committed, described and chosen here."""
