"""Convert, consolidate, compare and verify checkpoints in one process, without a process group.

Imports load/, save/, format/, config, terminal, paths and errors; no other package imports this one.
"""
