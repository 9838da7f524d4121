"""A valid command line of the subcommand: see tests/wrong_inputs/case.py."""

TOOLS = {"models": ["--prove", "llama"]}
LEGAL = {"all decoders": ("models --prove (no value)",)}
