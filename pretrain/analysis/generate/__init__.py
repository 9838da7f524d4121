"""Generate text from a checkpoint or from a transformers folder, with `generate` of the transformers model.

prompts.py reads the prompts without torch, load_model.py builds the transformers model, and decode.py continues the
prompts. Imports model_source, checkpoint/, data/, model/, distributed/, terminal, cli and errors.
"""
