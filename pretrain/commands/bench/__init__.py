"""Benchmarks (`ds-pretrain bench`): this project, other training programs, and the limits of the machine.

sections, profile, startup and data have the sections of --what. project and peers have the baselines, which worker runs
in processes of their own.
"""
