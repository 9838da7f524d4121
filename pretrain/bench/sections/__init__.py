"""Sections of the benchmark. Each module runs the baselines of one choice of --what, and computes its table.

Imports bench/processes/, model/ and distributed/; not the baselines, which run in other processes.
"""
