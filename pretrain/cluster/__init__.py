"""Launching on one or several hosts: preflight checks, SLURM jobs, the supervisor, and the cluster health check.

Imports analysis, checkpoint, config, engine, monitor, distributed, cli, paths and errors; never bench/ or trainer.
"""
