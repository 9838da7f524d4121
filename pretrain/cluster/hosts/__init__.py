"""Hosts of a run: hostfile, preflight checks, remote commands, rank environment, and shutdown of all hosts together.

Imports config/arguments, distributed, cli and errors; never supervise/, health/ or the launch modules.
"""
