"""Scaling laws: the expected loss of a model of N parameters that is trained with D tokens, from smaller models."""
