"""Command lines of the subcommand: see tests/wrong_inputs/case.py."""

from tests.wrong_inputs.paths import NAME, NO_FILE, NO_NEW_FOLDER, UNREADABLE

TOOLS = {"new": ["{world}/new.yaml", "--data", "{world}/text.txt", "--tokenizer", "bytes", "--model", "tiny", "--gpu",
                 "cpu", "--world_size", "2", "--seq_length", "64", "--overwrite"]}
LEGAL = {"any text is valid, also of `new`": ("new --jsonl_key=~/x",)}
PATHS = [(("new",), "PATH.yaml REST", NO_FILE, NAME),
         *((("new",), f"RIGHT --{flag} PATH", UNREADABLE, flag) for flag in ("model", "tokenizer")),
         (("new",), "RIGHT --data PATH", UNREADABLE, NAME),
         (("new",), "RIGHT --save PATH", NO_NEW_FOLDER, "--save")]
