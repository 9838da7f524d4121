"""Processes of the compared baselines: started, kept waiting, asked for interleaved repetitions, ended.

Imports bench/settings.py, config/, data/, model/, engine/ and distributed/; never bench/baselines/ or bench/sections/.
"""
