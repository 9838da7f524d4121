"""Training data: preparation, .bin/.idx files, samples, batches and tokenizers (tokenizers/).

Imports numpy, torch, terminal/, cli, paths and errors; sentencepiece, tokenizers and transformers when they are used.
Never imports config/ or model/: callers pass plain values, not flags.
"""
