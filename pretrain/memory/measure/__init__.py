"""Measured memory of real engines: an inventory of an engine's tensors, trackers, and short runs on this machine.

Imports memory/footprint.py, config, data, distributed, engine and errors; never the other folders of memory/.
"""
