"""Sharded checkpoints: saved, described, validated, loaded and converted.

Imports engine, monitor, config, data, model, distributed, patches, console and errors; never memory or cluster.
"""
