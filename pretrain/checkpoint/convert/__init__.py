"""Convert, export, import, compare and verify checkpoints in one process, without a process group.

Imports load/, format/, monitor, config, data, model, terminal, paths and errors. analysis/ imports it.
"""
