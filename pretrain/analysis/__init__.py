"""Tools for existing runs: the summary and loss plot of a run folder, text generation and evaluation.

Imports checkpoint/, monitor/, engine/, config/, data/, model/, distributed/, terminal, cli and errors; never the
trainer or cluster/.
"""
