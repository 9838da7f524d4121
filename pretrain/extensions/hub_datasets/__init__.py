"""Datasets of the Hugging Face Hub as inputs of `ds-pretrain prepare` and `ds-pretrain tokenizer`."""
