"""Graceful stop of a run: a signal to any rank makes all ranks save a checkpoint and end.

This folder imports no other folder of pretrain/.
"""
