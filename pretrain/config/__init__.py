"""Settings of a run: flags and DeepSpeed JSON, validated and resolved to a Plan with one Layout.

Imports data/, model/ and distributed/, which do not import config/, and cli, paths and errors. Never imports torch or
deepspeed, nor the folders that use config/ (engine/ ...).
"""
