"""Run each baseline in processes of its own, and request interleaved repetitions from them.

Imports bench/settings.py, config/, data/, model/, engine/ and distributed/; never bench/baselines/ or bench/sections/.
"""
