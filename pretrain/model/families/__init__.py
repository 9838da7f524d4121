"""The model families: for each, the keys of its transformers config.json, and the names of its tensors.

Imports errors only, and neither torch nor transformers.
"""
