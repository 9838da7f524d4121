"""Ranks from the launcher, process group, device, collectives, and memory and ports of this process.

Imports terminal and errors. collectives.py and parallel_groups.py import torch, process_group.py when it is used.
"""
