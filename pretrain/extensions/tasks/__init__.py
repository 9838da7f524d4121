"""Evaluation inside a run: scores of lm-eval's tasks, and texts that the model writes."""
