"""`ds-pretrain quickstart`: trains a small model on a fresh machine, from corpus to sample."""
