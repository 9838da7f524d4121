"""Hosts of a run: hostfile, preflight checks, remote commands, rank environment, and shutdown of all hosts together.

This folder imports config/flags/arguments, distributed, cli and errors. It never imports supervise/, health/ or the
modules that launch a run (ds_pretrain, local_launch, multihost_launch, slurm_job).
"""
