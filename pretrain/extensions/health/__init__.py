"""Health of machines and clusters.

`ds-pretrain doctor` (doctor.py, with the table facts.py) reads facts about each host, without ranks. In the cluster
health check (`ds-pretrain check-cluster`, check.py), every rank measures its host, and rank 0 reports outliers.
"""
