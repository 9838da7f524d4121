"""Evaluation of a model: loss, perplexity and bits per byte on data.

data.py opens the data as windows of tokens (token_windows.py), without torch. evaluate.py loads the model, sums its
losses and prints the results.

Imports model_source, checkpoint/, monitor/, engine/, config/, data/, model/, distributed/, terminal, cli and errors;
never the trainer or cluster/.
"""
