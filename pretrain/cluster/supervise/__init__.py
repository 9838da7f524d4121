"""Supervisor (`ds-pretrain supervise`): it restarts a run that crashed or was stopped, and logs every start.

This folder imports cluster/hosts, cluster/launcher_flags, checkpoint, config, distributed, monitor and errors. It never
imports health/ or the modules that launch a run (ds_pretrain, local_launch, multihost_launch, slurm_job).
"""
