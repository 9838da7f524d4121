"""Cluster health check (tools/check_cluster.py): every rank measures its host; rank 0 reports faults and outliers.

Imports cluster/hosts and the layers below cluster/; never supervise/ or the launch modules.
"""
