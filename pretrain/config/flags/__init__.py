"""Flags of train.py, which are also the keys of its YAML file: declared, parsed, explained by --help and validated.

Imports only data, model, config/schedule.py and config/other_programs.py, cli, paths and errors.
"""
