"""Custom kernels for attention, MLP and loss; torch's operators are the fallback.

Imports torch only.
"""
