"""The commands of tools/data.py: describe, hash, verify, merge and split token files."""
