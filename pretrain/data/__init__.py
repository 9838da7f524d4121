"""Training data.

text_inputs/ reads documents from text files, tokenizers/ encodes them, and prepare/ writes token files of them.
token_files/ reads token files, and samples/ takes samples from them in an order. run_data.py opens the data of a run,
and loader.py makes its micro-batches.

Imports numpy, torch, progress, cli, paths and errors; sentencepiece, tokenizers and transformers when they are used.
Never imports config/ or model/: callers pass plain values, not flags.
"""
