"""Build the DeepSpeed engine from a plan, run its steps, and compile DeepSpeed's operators.

Imports config, data, model, distributed, patches and what lies below them; never monitor, memory or checkpoint.
"""
