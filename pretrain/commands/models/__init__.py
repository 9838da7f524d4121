"""`ds-pretrain models`: families, presets, and which decoders of transformers can be trained."""
