"""User interface of the memory planner: tools/compare_zero.py with its tables.

Imports all other folders and modules of memory/, and cli, config, distributed, model, paths and errors.
"""
