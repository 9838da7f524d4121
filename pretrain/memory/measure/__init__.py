"""Measured memory of real engines: an inventory of tensors, a tracker, short runs on this machine, simulated ranks.

Imports memory/footprint.py, config, data, distributed, engine and errors; never the other folders of memory/.
"""
