"""Hosts of a run: hostfile, preflight checks, remote commands, rank environment, and shutdown of all hosts together.

Imports cluster/launcher_flags and the layers below cluster/; never supervise/ or health/.
"""
