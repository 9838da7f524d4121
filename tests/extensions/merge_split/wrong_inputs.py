"""Command lines of the subcommands, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

TOOLS: dict[str, list[str]] = {
    "data merge": ["{world}/out", "{world}/corpus", "{world}/foreign"],
    "data split": ["{world}/corpus", "--proportions", "9,1", "--out", "{world}/out", "{world}/other"]}
_NAME = "the last part of the path"
_NO_PREFIX = {"under a file": "{world}/file/x", "long": "{world}/" + "n" * 300, "proc": "/proc/x",
              "proc below": "/proc/x/y", "slash": "{world}/nvme/", "dot": ".", "dot dot": "..", "suffix": "x.bin"}
_NO_DATA = {name: f"{{world}}/{name}" for name in ("none", "truncated", "corrupt", "lonely", "x.bin", "nvme/")}
PATHS = [(("data split",), "{world}/corpus --documents rest --out PATH", _NO_PREFIX, "--out"),
         (("data merge",), "PATH {world}/corpus", _NO_PREFIX, _NAME),
         (("data split",), "PATH REST", _NO_DATA, _NAME),
         (("data merge",), "{world}/out PATH {world}/foreign", _NO_DATA, _NAME)]
LINES: list[tuple[str, str, str, dict[str, bytes]]] = [
    ("data split", f"{{world}}/corpus {flag} {sizes} --out a b", flag, {})
    for flag in ("--proportions", "--documents") for sizes in ("2", "1,x", "1,1,1")]
