"""Benchmarks (`python tools/bench.py`): this project, other training programs, and the limits of the machine.

`sections`, `profile`, `startup`, `data`, `store` and `control` have the sections of --what. `project` and `peers` have
the baselines, which `worker` runs in processes of their own.
"""
