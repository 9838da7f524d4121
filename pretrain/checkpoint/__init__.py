"""Sharded checkpoints: saved, described, validated, loaded and converted.

Imports engine, monitor, config, model, distributed, patches, terminal, paths and errors; never memory or cluster.
"""
