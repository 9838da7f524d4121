"""Tools that look at a run from outside: the summary of a run folder, text generation from a checkpoint.

Imports checkpoint/, monitor/, data/, model/ and config/; never the trainer, cluster/ or bench/.
"""
