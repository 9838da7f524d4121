"""Flags of train.py, which are also the keys of its YAML file: declared, parsed, explained by --help and validated.

Imports only errors, cli, paths and config/lr_schedule.py from outside this folder.
"""
