"""A command line of the subcommand: see tests/wrong_inputs/case.py."""

TOOLS = {"completion": ["bash"]}
