"""Benchmarks: this project compared with other training programs and with the limits of the machine.

Imports trainer.py and the folders below it; only tools/bench.py imports it.
"""
