"""Settings of a run: flags and DeepSpeed JSON, validated and resolved to a Plan with one Layout.

Imports data/, model/ and distributed/, which take plain values; never torch, deepspeed or a folder above (engine/ ...).
"""
