"""Generate text from a checkpoint or from a transformers folder, with `generate` of the transformers model.

main.py is the command. prompts.py reads the prompts, and source.py finds the model, both without torch. load_model.py
builds the transformers model, and decode.py continues the prompts.
"""
