"""Evaluation of a model: loss, perplexity and bits per byte on data, and tasks of lm-eval.

data.py opens the data as windows of tokens (token_windows.py), and task_files.py finds the tasks, both without torch.
evaluate.py loads the model, sums its losses and prints the results. tasks.py runs lm-eval with an exported model.

Imports model_source, checkpoint/, monitor/, engine/, config/, data/, model/, distributed/, terminal, cli and errors;
never the trainer or cluster/.
"""
