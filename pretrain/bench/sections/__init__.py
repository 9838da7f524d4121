"""Sections of the benchmark, one module for each choice of --what: run the baselines, compute the table.

Imports bench/processes/, bench/settings.py, model/ and distributed/; the baselines run in processes of their own.
"""
