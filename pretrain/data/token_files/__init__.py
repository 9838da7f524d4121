"""Token files: .bin/.idx pairs as Megatron-LM and GPT-NeoX write them, and hashes of their bytes."""
