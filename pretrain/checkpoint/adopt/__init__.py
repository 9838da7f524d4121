"""Adopt a run of another program: its checkpoint becomes one of ours, with optimizer states and data position."""
