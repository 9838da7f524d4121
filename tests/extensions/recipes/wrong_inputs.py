"""Command lines of the subcommand: see tests/wrong_inputs/case.py."""

TOOLS = {"reproduce": ["layouts", "--out", "{world}/out"]}
