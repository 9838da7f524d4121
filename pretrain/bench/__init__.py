"""Benchmarks: compare this project with other training programs and with the limits of the machine.

A baseline is anything that is measured: a part of this project, another training program, or a limit of the machine.

Imports trainer.py and the folders below it; only tools/bench.py and its tests import it.
"""
