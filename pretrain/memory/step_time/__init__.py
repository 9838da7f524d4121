"""Estimated time of a step and cost of a run, from FLOPs, traffic and the rates of the hardware.

Imports config, model, monitor's readers of run folders, memory's estimate/ and hardware; never the other folders of
memory/.
"""
