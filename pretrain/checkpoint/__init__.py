"""Sharded checkpoints: saved, described, validated, loaded and converted.

Imports engine, monitor, config, data, model, distributed, terminal, paths and errors; never memory or cluster.
"""
