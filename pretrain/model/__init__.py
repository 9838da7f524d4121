"""The model: its config, layers and initial weights, as a PipelineModule or a plain module.

Imports torch, DeepSpeed and errors. Never imports config/ or data/: callers pass plain values, not flags.
"""
