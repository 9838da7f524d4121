"""Command lines of the subcommand, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

TOOLS = {"supervise": ["--save", "{world}/run", "--", "true"]}
LEGAL = {"any text is a command": ("supervise --health_command=~/x",)}
_UNREADABLE = {"missing": "{world}/none", "folder": "{world}/nvme", "under a file": "{world}/file/x",
               "long": "{world}/" + "n" * 300, "proc": "/proc/self/none"}
PATHS = [
    (("supervise",), "--hostfile PATH --save {world}/run -- deepspeed pretrain/train.py", _UNREADABLE, "--hostfile"),
    (("supervise",), "-- deepspeed pretrain/train.py --config PATH", _UNREADABLE, "--config"),
    (("supervise",), "--save PATH -- true", {"under a file": "{world}/file/x", "long": "{world}/" + "n" * 300,
                                             "proc": "/proc/x", "proc below": "/proc/x/y"}, "--save")]
LINES = [("supervise", "ds-pretrain --save {world}/run", "`--`", {})]
