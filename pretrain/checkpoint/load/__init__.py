"""Load a checkpoint: choose one, validate it, and load it into an engine of any layout.

Imports format/, save/, config, data, model, monitor, terminal, distributed and errors; never convert/.
"""
