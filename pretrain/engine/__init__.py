"""The DeepSpeed engine: built from a plan, stepped, and its compiled operators.

Imports config, data, model, distributed, patches and what lies below them; never monitor, memory or checkpoint.
"""
