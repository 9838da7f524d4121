"""Ranks from the launcher, process group, device, collectives, and this process's memory and ports.

Imports patches, console, cli, paths and errors. Only process_group.py and collectives.py import torch.
"""
