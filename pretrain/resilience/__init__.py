"""Guards of a run: requests to stop, bad steps and rollback, hangs, the run lock, equal replicas, unchanged data.

Imports checkpoint/, engine/, config/, data/, monitor/, distributed/, terminal, paths and errors; never cluster/. The
guards of one process (`rank_guards` in watchdog.py), which start before torch is imported, and the modules that
launchers use import neither torch nor DeepSpeed.
"""
