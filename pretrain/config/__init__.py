"""Settings of a run: flags and DeepSpeed JSON, validated and resolved to a Plan with one Layout.

Imports data/, model/ and distributed/, which do not import config/. Never imports torch or deepspeed, nor the folders
that use config/ (engine/ ...).
"""
