"""Read checkpoints of GPT-NeoX and Megatron-DeepSpeed, which have a file for each layer or tensor-parallel rank."""
