"""Hosts of a run: hostfile, preflight checks, remote commands, rank environment, launchers as child processes, a store
for values of all ranks, and shutdown of all hosts together.

This folder imports resilience/signals, checkpoint/save/background, config, data, distributed, cli and errors. It never
imports the modules that launch a run (ds_pretrain, multihost_launch, slurm_job).
"""
