"""Tools for existing runs: the summary and loss plot of a run folder, and text generation from a checkpoint.

Imports checkpoint/, monitor/, data/, model/, cli and errors; never the trainer, cluster/ or bench/.
"""
