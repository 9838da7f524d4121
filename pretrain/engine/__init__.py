"""Build the DeepSpeed engine from a plan, run its steps, and compile DeepSpeed's operators.

Imports config/, data/, model/, distributed/ and the modules that these import. Never imports monitor/,
memory/ or checkpoint/.
"""
