"""Launching on one or several hosts: preflight checks, SLURM jobs, the supervisor, and the cluster health check.

Imports checkpoint, config, distributed, engine, monitor, cli and errors; never bench/ or trainer.
"""
