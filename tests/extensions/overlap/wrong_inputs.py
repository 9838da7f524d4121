"""Command lines of the subcommand, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

_PROGRAM = "data overlap"
TOOLS: dict[str, list[str]] = {_PROGRAM: ["{world}/corpus", "--against", "{world}/foreign"]}
LEGAL = {"any text is an evaluation set's key or separator": (
    "data overlap --jsonl_key=~/x", "data overlap --document_separator=~/x")}
_NO_PREFIX = {"under a file": "{world}/file/x", "long": "{world}/" + "n" * 300, "proc": "/proc/x",
              "proc below": "/proc/x/y", "slash": "{world}/nvme/", "dot": ".", "dot dot": "..", "suffix": "x.bin"}
_NO_DATA = {name: f"{{world}}/{name}" for name in ("none", "truncated", "corrupt", "lonely", "x.bin", "nvme/")}
_UNREADABLE = {"missing": "{world}/none", "folder": "{world}/nvme", "under a file": "{world}/file/x",
               "long": "{world}/" + "n" * 300, "proc": "/proc/self/none"}
PATHS = [((_PROGRAM,), "PATH REST", _NO_DATA, "the last part of the path"),
         ((_PROGRAM,), "RIGHT --remove --out PATH", _NO_PREFIX, "--out"),
         ((_PROGRAM,), "RIGHT --tokenizer PATH", _UNREADABLE, "--tokenizer")]
OUTPUT_FILES = [((_PROGRAM,), "RIGHT --json PATH", {"folder": "{world}/nvme"}, "--json")]
