"""Launchers for one or several hosts: preflight checks, and SLURM jobs.

This folder imports checkpoint, config, distributed, engine, monitor, cli and errors. It never imports the
trainer.
"""
