"""Ranks from the launcher, process group, device, collectives, and memory and ports of this process.

Imports terminal and errors. Only process_group.py and collectives.py import torch.
"""
