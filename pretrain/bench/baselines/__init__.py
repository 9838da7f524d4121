"""Main functions of the baselines: this project, other training programs, and the limits of the machine.

Imports bench/processes/ and whatever pretrain/trainer.py imports; never bench/sections/.
"""
