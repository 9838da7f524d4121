"""Learning-rate schedules, the length of a run, and scaling of the peak rate: pure functions of plain values.

Imports only errors and data/token_schedules.py from outside this folder.
"""
