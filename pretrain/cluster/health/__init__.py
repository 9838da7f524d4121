"""Cluster health check (tools/check_cluster.py): every rank measures its host; rank 0 reports faults and outliers.

Imports cluster/hosts, checkpoint, config, distributed, engine and errors; never supervise/ or the launch modules.
"""
