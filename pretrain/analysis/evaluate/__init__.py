"""Evaluation of a model: loss, perplexity and bits per byte on data, and tasks of lm-eval.

data.py opens the data as windows of tokens (token_windows.py), and task_files.py finds the tasks, both without torch.
losses.py loads the model and sums its losses, evaluate.py turns them into results and prints them, and tasks.py runs
lm-eval with an exported model (prepare_tasks.py).

Imports model_source, checkpoint/, monitor/, engine/, config/, data/, model/, distributed/, terminal, cli and errors;
never the trainer or cluster/.
"""
