"""A valid command line of the subcommand: see tests/wrong_inputs/case.py."""

TOOLS = {"translate": ["{world}/other.yml", "--output", "{world}/out"]}
