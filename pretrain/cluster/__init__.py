"""Launchers for one or several hosts: preflight checks, SLURM jobs, the supervisor, and the cluster health check.

This folder imports checkpoint, config, distributed, engine, monitor, cli and errors. It never imports the
trainer.
"""
