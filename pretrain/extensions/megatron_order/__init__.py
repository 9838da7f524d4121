"""The orders of samples of Megatron-LM and GPT-NeoX, to continue their runs."""
