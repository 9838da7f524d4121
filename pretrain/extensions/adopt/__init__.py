"""Adopt a run of another program: its checkpoint becomes one of ours, with optimizer states and data position.

`sources.py` recognizes what a folder has. The modules of `deepspeed/`, `megatron/` and `dcp/` read one kind of
checkpoint each, and return a `ForeignRun` (`foreign_run.py`). `adopt.py` checks it and writes the run folder: our
parameters by `mapping.py`, settings by `run_files.py`. `optimizers.py` recognizes an optimizer, for all
kinds.
"""
