"""Simulation of one rank of any number of ranks: a real DeepSpeed engine on fake tensors, in one process.

Imports memory/measure/, memory/estimate/, engine/, config/ and distributed/; never memory/search/ or memory/report/.
"""
