"""Save checkpoints: snapshot, background writer, atomic commit, retention and mirror.

Imports format/, config, engine, monitor, terminal, distributed and errors; never load/ or convert/.
"""
