"""Run each baseline in processes of its own, and request interleaved repetitions from them.

Imports bench/settings.py, config/, data/, model/, engine/ and distributed/; never bench/sections/.
worker.py imports one module of bench/baselines/ by name, at run time.
"""
