"""Training data: preparation, .bin/.idx files, samples, batches and tokenizers.

Imports numpy, torch, console, cli, paths and errors; never config/ or model/: it knows no flags.
"""
