"""The model: its config, layers and initial weights, as a PipelineModule or a plain module.

Imports torch, DeepSpeed, cli and errors; huggingface_hub when a repository is named. Never imports config/ or data/:
callers pass plain values, not flags.
"""
