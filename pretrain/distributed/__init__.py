"""Ranks from the launcher, process group, device, collectives, and this process's memory and ports.

Imports patches, console and errors. Only process_group.py and collectives.py import torch.
"""
