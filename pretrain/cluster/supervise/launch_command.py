"""What a launch command says about its run: flags, run folder, hostfile; and the same command for other hosts.

A launch command is any that starts pretrain/train.py: `deepspeed [launcher flags] pretrain/train.py FLAGS`,
`ds-pretrain [launcher flags] FLAGS`, `launch/cluster.sh [launcher flags] -- FLAGS`, `srun ... python pretrain/train.py
FLAGS`.
"""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.cluster.hosts.hostfile import choose_hosts, read_hostfile
from pretrain.cluster.launcher_flags import split_words
from pretrain.config.arguments import read_yaml
from pretrain.errors import ConfigError

_OWN = ("ds-pretrain", "cluster.sh")  # need no separator between the launcher's flags and those of train.py
_TAKE_HOSTFILE = ("ds-pretrain", "deepspeed", "cluster.sh", "mpirun", "mpiexec")
_FILTERS = ("include", "i", "exclude", "e", "num_nodes", "num_gpus", "num_accelerators")


def with_separator(command: Sequence[str]) -> list[str]:
    """The same command, with `--` before the flags of train.py where it may be left out."""
    launcher = command[:_split(command)] or command  # behind it such a word is a flag's value
    at = next((at for at, word in enumerate(launcher) if Path(word).name in _OWN), None)
    if at is None:
        return list(command)
    flags, train = split_words(command[at + 1:])
    return [*command[:at + 1], *flags, "--", *train]


def _split(command: Sequence[str]) -> int:
    """Where the flags of train.py begin: behind its name, or behind `--`; at 0 where there is neither."""
    names = [Path(word).name for word in command]
    end = next((name for name in ("train.py", "--") if name in names), None)
    return 0 if end is None else names.index(end) + 1


def train_words(command: Sequence[str]) -> list[str]:
    """The flags of train.py in the command."""
    return list(command[_split(command):])


def _launcher_words(command: Sequence[str]) -> list[str]:
    return list(command[:_split(command)])


def flag_value(words: Sequence[str], name: str) -> str | None:
    """The last value of `--name VALUE` or `--name=VALUE`, with - for _ too; None where the flag is missing."""
    value = None
    for at, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag.startswith("-") and flag.lstrip("-").replace("-", "_") == name:
            value = text if equals else words[at + 1] if at + 1 < len(words) else None
    return value


def run_setting(command: Sequence[str], name: str) -> str | None:
    """A flag of train.py, or that key of its --config YAML; None where neither has it. Raises ConfigError."""
    words = train_words(command)
    value, path = flag_value(words, name), flag_value(words, "config")
    if value is not None or path is None:
        return value
    return read_yaml(path).get(name, (0, None))[1]


def run_folder(command: Sequence[str], own: str | None) -> Path:
    """`own`, or what --save names in the command or its YAML. Raises ConfigError."""
    found = own or run_setting(command, "save")
    if not found:
        raise ConfigError("--save", found="nothing", expected="the run folder, to read the run's progress from",
                          remedy="give --save to train.py, or to supervise.py before the --")
    return Path(str(found)).absolute()


def hostfile_of(command: Sequence[str], own: str | None) -> Path | None:
    """`own`, or what --hostfile (-H) names among the launcher's flags; None: the hosts are the launcher's business."""
    words = _launcher_words(command)
    found = own or flag_value(words, "hostfile") or flag_value(words, "H")
    return Path(found) if found else None


def hosts_of(command: Sequence[str], hostfile: Path) -> dict[str, int]:
    """Host -> slots that take part, by the hostfile and the launcher's own filters. Raises ConfigError."""
    words = _launcher_words(command)

    def value(*names: str) -> str:
        return next((found for name in names if (found := flag_value(words, name)) is not None), "")

    def number(*names: str) -> int:
        return int(value(*names)) if value(*names).isdecimal() else -1

    chosen = choose_hosts(read_hostfile(str(hostfile)), include=value("include", "i"), exclude=value("exclude", "e"),
                          num_nodes=number("num_nodes"), num_slots=number("num_gpus", "num_accelerators"))
    return {host: len(slots) for host, slots in chosen.items()}


def ssh_port(command: Sequence[str]) -> str | None:
    """DeepSpeed's --ssh_port."""
    return flag_value(_launcher_words(command), "ssh_port")


def with_hostfile(command: Sequence[str], hostfile: Path) -> list[str]:
    """The command with this hostfile instead of its own. Raises ConfigError where it takes none."""
    words = list(command)
    for at, word in enumerate(words[:_split(words)]):
        flag, equals, _ = word.partition("=")
        if flag in ("--hostfile", "-H"):
            words[at:at + (1 if equals else 2)] = [flag, str(hostfile)]
            return words
    for at, word in enumerate(words[:_split(words)]):
        if Path(word).name in _TAKE_HOSTFILE:
            return [*words[:at + 1], "--hostfile", str(hostfile), *words[at + 1:]]
    raise ConfigError("--hostfile", found=f"{words[0]}, which takes no hostfile",
                      expected=f"a command of {', '.join(_TAKE_HOSTFILE)}")


def check_can_lose_hosts(command: Sequence[str]) -> None:
    """For --min_hosts: the hostfile alone must say which hosts take part. Raises ConfigError."""
    with_hostfile(command, Path("hosts"))
    for name in _FILTERS:
        if flag_value(_launcher_words(command), name) is not None:
            flag = f"--{name}" if len(name) > 1 else f"-{name}"
            raise ConfigError(flag, found="beside --min_hosts", expected="a hostfile that says it all",
                              remedy="leave out of the hostfile what is not to be used")


def for_fewer_hosts(command: Sequence[str], hosts: Mapping[str, int], dropped: Sequence[str], hostfile: Path,
                    start: Mapping[str, Any]) -> list[str]:
    """The command on `hosts` (name -> slots) alone, at the global batch that `start`, a record of run.json, had.

    Writes `hostfile`. Raises ConfigError where that batch cannot be divided among them.
    """
    accumulation = accumulation_for(sum(hosts.values()), start)
    hostfile.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items()), encoding="utf-8")
    words = _with_master(with_hostfile(command, hostfile), dropped, next(iter(hosts)))
    if len(hosts) == 1:
        words = _on_that_host(words)
    return [*words, f"--gradient_accumulation_steps={accumulation}",
            f"--global_batch_size={start['batch']['global_batch_size']}"]


def accumulation_for(ranks: int, start: Mapping[str, Any]) -> int:
    """Gradient accumulation steps that give `ranks` the global batch of `start`. Raises ConfigError."""
    layout, sizes = start["layout"], start["batch"]
    parts = layout["world_size"] // layout["data_parallel_size"]  # ranks that hold one model together
    share = sizes["micro_batch_size"] * (ranks // parts)  # samples of one accumulation step
    if ranks < parts or ranks % parts or sizes["global_batch_size"] % share:
        raise ConfigError("--min_hosts", found=f"{ranks} ranks left, with {parts} to a model, micro batches of "
                          f"{sizes['micro_batch_size']} and a global batch of {sizes['global_batch_size']}",
                          expected="ranks that divide that batch",
                          remedy="choose slots and a global batch that close for fewer hosts, or leave --min_hosts out")
    return int(sizes["global_batch_size"] // share)


def _with_master(command: list[str], dropped: Sequence[str], first: str) -> list[str]:
    """--master_addr of a dropped host becomes the first one that is left."""
    master = flag_value(_launcher_words(command), "master_addr")
    if master is None or _address(master) not in {_address(host) for host in dropped}:
        return command
    end = _split(command)
    head = [word.replace(master, first) if word == master or word.endswith(f"={master}") else word
            for word in command[:end]]
    return head + command[end:]


def _on_that_host(command: list[str]) -> list[str]:
    """`deepspeed` would start the ranks of a single host here, whichever host that is."""
    at = next((at for at, word in enumerate(command[:_split(command)]) if Path(word).name == "deepspeed"), None)
    return command if at is None else [*command[:at + 1], "--force_multi", *command[at + 1:]]


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def identity(command: Sequence[str]) -> list[str]:
    """Words by which a rank of this run is known: the flags of train.py; [] where they do not name the run."""
    words = train_words(command)
    named = any(flag_value(words, name) is not None for name in ("save", "config"))
    return words if named else []
