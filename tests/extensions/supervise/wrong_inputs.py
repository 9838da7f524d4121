"""Command lines of the subcommand, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

from tests.wrong_inputs.paths import UNREADABLE, UNWRITABLE

TOOLS = {"supervise": ["--save", "{world}/run", "--", "true"]}
LEGAL = {"any text is a command": ("supervise --health_command=~/x",)}
PATHS = [
    (("supervise",), "--hostfile PATH --save {world}/run -- deepspeed pretrain/train.py", UNREADABLE, "--hostfile"),
    (("supervise",), "-- deepspeed pretrain/train.py --config PATH", UNREADABLE, "--config"),
    (("supervise",), "--save PATH -- true", UNWRITABLE, "--save")]
_HOSTFILE = "--hostfile {world}/in.hosts --save {world}/run -- deepspeed pretrain/train.py"
_HOST_LINES = ("a", "a:8", "a:8:9", "[servers]", "a 8", "a cpu=8", "a lots=8", "a slots=8 max_slots=8", "a slots=-1",
               "a slots=0", "a slots=x", "a slots = 8", "a slots: 8", "a slots=100001", "me@a slots=8", "a;b slots=8",
               "node[1-4] slots=8", "a b slots=8", "fe80::1 slots=8", "slots=8", '{"a": 8}')
READERS = [("hostfile", "supervise", _HOSTFILE, "in.hosts")]
LINES = [("supervise", "ds-pretrain --save {world}/run", "`--`", {}),
         *(("supervise", _HOSTFILE, "in.hosts:1: ", {"in.hosts": line.encode()}) for line in _HOST_LINES)]
PROCESSES = ("supervise --hostfile PATH --save {world}/run -- deepspeed pretrain/train.py: missing",)
