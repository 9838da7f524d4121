"""Stopping a run in an orderly way: signals that ask all ranks to save and end.

Imports no other folder of pretrain/.
"""
