"""Output to a terminal or a log: status line, progress and training rows.

Imports the standard library, rich and errors; never torch.
"""
