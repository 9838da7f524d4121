"""Main functions of the baselines: this project, other training programs, and the limits of the machine.

Imports bench/processes/, pretrain/trainer.py and the packages below it; never bench/sections/.
"""
