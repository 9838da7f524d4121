"""Launchers for one or several hosts: preflight checks, SLURM jobs, and the supervisor.

This folder imports checkpoint, config, distributed, engine, monitor, cli and errors. It never imports the
trainer.
"""
