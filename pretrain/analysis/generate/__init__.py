"""Generate text from a checkpoint or from a transformers folder, with `generate` of the transformers model.

source.py finds the model, prompts.py reads the prompts, and devices.py chooses dtype and devices, all without torch.
load_model.py builds the transformers model, decode.py continues the prompts, and interactive.py reads them from a
terminal. Imports checkpoint/, data/, model/, distributed/, terminal/, cli and errors.
"""
