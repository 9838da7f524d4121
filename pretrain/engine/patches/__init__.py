"""Work-arounds for defects of DeepSpeed 0.19.8; the table of defects is in apply.py.

The modules are named by the part of DeepSpeed that they patch.
"""
