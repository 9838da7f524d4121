"""Evaluation of a model: loss, perplexity and bits per byte on data, and tasks of lm-eval.

source.py finds the model and its tokenizer, data.py opens the data, task_files.py finds the tasks, and settings.py
chooses dtype and partition, all without torch. verify.py compares files with their hashes, losses.py loads the model
and sums its losses, evaluate.py turns them into results, tasks.py runs lm-eval, and report.py prints.

Imports checkpoint/, monitor/, engine/, config/, data/, model/, distributed/, terminal/, cli and errors; never the
trainer, cluster/ or bench/.
"""
