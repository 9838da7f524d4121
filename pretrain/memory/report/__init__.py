"""User interface of the memory planner: tools/compare_zero.py with its tables, and the memory line of a run.

Imports every other folder of memory/, and cli, config, distributed, model and paths.
"""
