"""Output to a terminal or a log: status line, progress and training rows.

Imports only the standard library and rich.
"""
