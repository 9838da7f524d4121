"""Rules for combinations of settings, one small function for each.

DeepSpeed 0.19.8 crashes during set-up on some of the rejected combinations, and silently does something else on the
others.
"""
