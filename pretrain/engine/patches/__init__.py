"""Work-arounds for DeepSpeed's defects; the table of defects is in apply.py.

The modules are named by the part of DeepSpeed that they patch.
"""
