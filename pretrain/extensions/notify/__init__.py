"""A process that follows the files of a run: it sends messages about the run, and serves its metrics.

The process is started by the owner of a start (`receivers.py`). It also reports ranks that are stopped or dead. It
costs the ranks nothing, needs the secrets on one host only, and imports no torch.
"""
