"""Candidate layouts for a model on a cluster: which are possible, which fit, which is the fastest, how large fits.

Imports config, model, distributed, errors and memory's estimate/, step_time/, hardware and sizes; never report/.
"""
