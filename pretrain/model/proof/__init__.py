"""Proof that a model trains as transformers' own, on a tiny copy of its config (tiny.py, prove.py)."""
