"""Evaluation of a model: loss, perplexity and bits per byte on data, and tasks of lm-eval.

`inputs` imports no torch. Imports checkpoint/, engine/, data/, model/, monitor/, distributed/, terminal/, cli and
errors; never the trainer, cluster/ or bench/.
"""
