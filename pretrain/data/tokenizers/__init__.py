"""Tokenizers: read, trained, and exported for transformers.

tokenizer.py loads a tokenizer of any supported format, and special_tokens.py finds its special tokens.
train_tokenizer.py trains one, export_tokenizer.py writes the files for transformers and checks them. The other modules
read and convert file formats.
"""
