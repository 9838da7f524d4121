"""Cluster health check (tools/check_cluster.py): every rank measures its host, and rank 0 reports faults and outliers.

This folder imports cluster/hosts, checkpoint, config, distributed, engine and errors. It never imports supervise/ or
the modules that launch a run (ds_pretrain, local_launch, multihost_launch, slurm_job).
"""
