"""Command lines of the subcommand, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

from tests.wrong_inputs.paths import NAME, NO_DATA, NO_PREFIX, UNREADABLE

_PROGRAM = "data overlap"
TOOLS: dict[str, list[str]] = {_PROGRAM: ["{world}/corpus", "--against", "{world}/foreign"]}
LEGAL = {"any text is an evaluation set's key or separator": (
    "data overlap --jsonl_key=~/x", "data overlap --document_separator=~/x")}
PATHS = [((_PROGRAM,), "PATH REST", NO_DATA, NAME),
         ((_PROGRAM,), "RIGHT --remove --out PATH", NO_PREFIX, "--out"),
         ((_PROGRAM,), "RIGHT --tokenizer PATH", UNREADABLE, "--tokenizer")]
OUTPUT_FILES = [((_PROGRAM,), "RIGHT --json PATH", {"folder": "{world}/nvme"}, "--json")]
