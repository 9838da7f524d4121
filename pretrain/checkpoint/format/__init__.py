"""Checkpoints on disk: manifest, hashed files, pickles, and where each parameter is stored.

Imports config, errors, torch and deepspeed; never save/, load/ or convert/.
"""
