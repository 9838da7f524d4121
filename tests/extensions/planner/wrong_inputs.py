"""Wrong command lines of `compare` with the planner's flags: see tests/wrong_inputs/commands.py."""

from tests.wrong_inputs.paths import LONG

_FOLDER = {"folder": "{world}/nvme"}
OUTPUT_FILES = [*((("compare",), f"RIGHT {flag} PATH", _FOLDER, flag) for flag in ("--json", "--csv")),
                (("compare",), "RIGHT --plot PATH.html", dict[str, str](), "--plot")]
PATHS = [(("compare",), "RIGHT --plot PATH", _FOLDER, "--plot"),
         (("compare",), "RIGHT --configs PATH", {
             "missing": "{world}/none", "under a file": "{world}/file/x", "long": "{world}/" + LONG,
             "proc": "/proc/self/none", "proc below": "/proc/x/y", "file": "{world}/file", **_FOLDER},
          "the last part of the path")]
