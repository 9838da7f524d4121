"""Fault injection (tools/chaos.py): a supervised run meets random faults, and is compared with a run without faults.

This folder imports cluster/supervise, checkpoint, config, distributed, monitor and errors. No module of the run itself
knows of it: hooks/sitecustomize.py patches the ranks from outside.
"""
