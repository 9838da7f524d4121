"""Training data: token files (files/), samples and their order (samples/), preparation (prepare/), tokenizers/.

Imports numpy, torch, terminal/, cli, paths and errors; sentencepiece, tokenizers and transformers when they are used.
Never imports config/ or model/: callers pass plain values, not flags.
"""
