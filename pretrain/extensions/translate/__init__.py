"""`ds-pretrain translate`: settings of another training program become a YAML, a DeepSpeed JSON and a config.json."""
