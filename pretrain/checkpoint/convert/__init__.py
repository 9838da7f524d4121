"""Converting: universal format, consolidated weights, and the difference of two checkpoints. No process group.

Imports load/, save/, format/, config, console, paths and errors; no other package imports this one.
"""
