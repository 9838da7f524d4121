"""A valid command line of the subcommand, and wrong flags: see tests/wrong_inputs/case.py and inputs.py."""

TOOLS = {"replay": ["{world}/done@1"]}
WRONG = [({}, {"flight_steps": 0, "flight_interval": 5}, "--flight_interval: it has no effect")]
