"""ds-pretrain: pretraining of GPT-style models, run by the DeepSpeed engine."""

__version__ = "0.1.0"
