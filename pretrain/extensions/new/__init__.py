"""`ds-pretrain new`: writes the YAML and the DeepSpeed JSON of a run on one's own text, from a few answers."""
