"""Training data: token files (files/), samples in an order (samples/), the datasets of a run (datasets/), tokenizers/.

The preparation reads text files (inputs/) and writes token files (prepare/). commands/ has those of tools/data.py.

Imports numpy, torch, terminal/, cli, paths and errors; sentencepiece, tokenizers and transformers when they are used.
Never imports config/ or model/: callers pass plain values, not flags.
"""
