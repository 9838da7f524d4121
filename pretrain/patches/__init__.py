"""Work-arounds for defects of DeepSpeed 0.19.8; the table of defects is in apply.py.

Imports torch and DeepSpeed, and no other folder of this package.
"""
