"""What users see of the memory planner: tools/compare_zero.py with its tables, and the memory line of a run.

Imports every other folder of memory/, and config/, engine/ and distributed/.
"""
