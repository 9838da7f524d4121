"""Estimated time of a step, from FLOPs, traffic and the rates of the hardware, and its fit to measured runs."""
