"""Generate text from a checkpoint or from a transformers folder, with `generate` of the transformers model.

source.py finds the model and prompts.py the prompts, both without torch. load_model.py builds the transformers model,
and decode.py continues the prompts.
"""
