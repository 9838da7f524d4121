"""Benchmarks: compare this project with other training programs and with the limits of the machine (ds-pretrain bench).

sections, profile, startup and data have the sections of --what. project and peers have the baselines, which worker runs
in processes of their own.
"""
