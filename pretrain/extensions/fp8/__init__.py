"""Products of linear layers in FP8."""
