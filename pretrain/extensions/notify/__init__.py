"""A process that follows the files of a run: it sends messages about the run, and serves its metrics.

The process is started by the supervisor, otherwise by `ds-pretrain`, otherwise by rank 0 (`start.py`). It also
reports ranks that are stopped or dead. It costs the ranks nothing, and needs the secrets on one host only.
Without torch.
"""
