"""The model: its config, layers and initial weights, as a PipelineModule or a plain module.

Imports torch, DeepSpeed and errors; never config/ or data/: it knows no flags.
"""
