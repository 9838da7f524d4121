"""Wrong files of a sweep: see tests/wrong_inputs/case.py."""

from tests.wrong_inputs.paths import NAME, UNREADABLE

TOOLS = {"sweep": ["{world}/sweep.yaml"]}
PATHS = [(("sweep",), "PATH", UNREADABLE, NAME)]
