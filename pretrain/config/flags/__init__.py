"""Flags of train.py, which are also the keys of its YAML file: declared, parsed, explained by --help and validated.

Imports only errors, cli, paths and config/schedules/ from outside this folder.
"""
