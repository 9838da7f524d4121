"""A flag of a foreign run.json that names a folder: see tests/foreign_files/commands.py."""

PLACES = ("data_cache",)
