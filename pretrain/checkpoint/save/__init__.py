"""Save checkpoints: snapshot, background writer, atomic commit, retention and mirror.

Imports format/, config, engine, monitor, console, distributed and errors; never load/ or convert/.
"""
