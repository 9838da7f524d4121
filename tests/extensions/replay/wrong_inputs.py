"""A valid command line of the subcommand: see tests/wrong_inputs/case.py."""

TOOLS = {"replay": ["{world}/done@1"]}
