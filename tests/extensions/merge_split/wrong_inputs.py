"""Command lines of the subcommands, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

from tests.wrong_inputs.paths import NAME, NO_DATA, NO_PREFIX

TOOLS: dict[str, list[str]] = {
    "data merge": ["{world}/out", "{world}/corpus", "{world}/foreign"],
    "data split": ["{world}/corpus", "--proportions", "9,1", "--out", "{world}/out", "{world}/other"]}
PATHS = [(("data split",), "{world}/corpus --documents rest --out PATH", NO_PREFIX, "--out"),
         (("data merge",), "PATH {world}/corpus", NO_PREFIX, NAME),
         (("data split",), "PATH REST", NO_DATA, NAME),
         (("data merge",), "{world}/out PATH {world}/foreign", NO_DATA, NAME)]
LINES: list[tuple[str, str, str, dict[str, bytes]]] = [
    ("data split", f"{{world}}/corpus {flag} {sizes} --out a b", flag, {})
    for flag in ("--proportions", "--documents") for sizes in ("2", "1,x", "1,1,1")]
