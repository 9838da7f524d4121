"""Format of a checkpoint on disk: manifest, hashed files, pickles, and the location of each parameter.

Imports config, errors, torch and deepspeed; never save/, load/ or convert/.
"""
