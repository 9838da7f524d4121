"""DeepSpeed JSON files: reading, legal keys, and keys without an effect.

Imports only errors.py from outside this folder.
"""
