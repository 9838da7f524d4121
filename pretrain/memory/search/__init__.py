"""Search for layouts of a model on a cluster: layouts that are possible, that fit, the fastest, the largest model.

Imports config, model, distributed, errors and memory's estimate/, step_time/, hardware and sizes; never report/.
"""
