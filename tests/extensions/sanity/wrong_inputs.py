"""Command lines of the subcommands, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

TOOLS = {"sanity": None, "find-lr": None}
_FOLDER = {"folder": "{world}/nvme"}
OUTPUT_FILES = [(("sanity", "find-lr"), "RIGHT --json PATH", _FOLDER, "--json"),
                (("find-lr",), "RIGHT --plot PATH", {**_FOLDER, "png": "x.png"}, "--plot")]
LINES = [("find-lr", "RIGHT --from 0.1 --to 0.01", "--to", {})]
