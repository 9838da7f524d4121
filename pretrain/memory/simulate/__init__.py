"""Simulation of one rank of a run with any number of ranks: a real DeepSpeed engine on fake tensors, in one process.

Imports memory/footprint.py, memory/measure/, config, distributed, engine and errors; never memory/search/
or memory/report/.
"""
