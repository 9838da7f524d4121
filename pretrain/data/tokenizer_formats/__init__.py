"""File formats of tokenizers: SentencePiece, tokenizer.json, GPT-2's vocab.json; texts that compare two tokenizers.

Imports only special_tokens and errors.
"""
