"""Datasets of a run: parsed from its flags, opened, and divided into training, validation and test data."""
