"""Convert, consolidate, compare and verify checkpoints in one process, without a process group.

Imports load/, format/, config, terminal, paths and errors; no other package imports this one.
"""
