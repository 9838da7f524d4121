"""Merge token files and shards of a preparation, and split token files."""
