"""Environment variables of ranks on other hosts. `deepspeed` forwards few of them besides its `.deepspeed_env` file."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from pretrain.cluster.hosts.preflight import HostFacts
from pretrain.cluster.hosts.probe import JOB_VARIABLE
from pretrain.errors import ConfigError

FILE = ".deepspeed_env"
_FORWARDED_PREFIXES = (
    "GLOO_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_",
    "MKL_", "KMP_", "DS_", "DEEPSPEED_", "CUDA_DEVICE_", "CUDA_LAUNCH_", "FI_", "UCX_", "LD_LIBRARY_PATH")
_SECRETS = re.compile(r"TOKEN$|KEY$|SECRET|PASSWORD")  # not forwarded: command lines on the hosts would show them
_SAFE_VALUE = re.compile(r"[\w@%+=:,./ -]*")  # survives the quoting of each of DeepSpeed's launchers


def user_variables(environ: Mapping[str, str], folders: list[Path]) -> dict[str, str]:
    """Return the user's variables: those of the shell that affect training, then `.deepspeed_env` of each folder.

    Raises ConfigError for a line that is not NAME=VALUE. Accepts blank lines and comments, on which DeepSpeed fails.
    """
    found = {name: value for name, value in environ.items() if name.startswith(_FORWARDED_PREFIXES)
             and not _SECRETS.search(name) and _SAFE_VALUE.fullmatch(value) and name != "DS_ENV_FILE"}
    for path in (folder / FILE for folder in folders):
        for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
            name, equals, value = line.strip().removeprefix("export ").partition("=")
            if not name or name.startswith("#"):
                continue
            if not equals or not name.isidentifier():
                raise ConfigError(f"{path}:{number}", found=repr(line), expected="NAME=VALUE")
            found[name] = value
    return found


def interface_variables(facts: Mapping[str, HostFacts]) -> dict[str, str]:
    """Return NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME for the interfaces that connect the hosts.

    gloo accepts a single name, which each host must have. If the names differ, each rank chooses its own at its start.
    """
    names = list(dict.fromkeys(found.interface[0] for found in facts.values() if found.interface))
    if not names:
        return {}
    return {"NCCL_SOCKET_IFNAME": ",".join(names)} | ({"GLOO_SOCKET_IFNAME": names[0]} if len(names) == 1 else {})


def threads_per_rank(facts: Mapping[str, HostFacts], ranks: Mapping[str, int]) -> int:
    """Return OMP_NUM_THREADS: cores per rank, on the host that has the fewest."""
    return max(1, min(found.cores // ranks[host] for host, found in facts.items()))


def rank_variables(facts: Mapping[str, HostFacts], ranks: Mapping[str, int], user: Mapping[str, str],
                   job: str) -> dict[str, str]:
    """Return all variables for the ranks. The user's variables override the computed ones."""
    return {"OMP_NUM_THREADS": str(threads_per_rank(facts, ranks)), **interface_variables(facts), **user,
            JOB_VARIABLE: job}


def launcher_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment plus `variables`, with the scripts of this Python environment first in PATH."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **variables, "PATH": path}


def write_environment(run: Path, variables: Mapping[str, str]) -> Path:
    """Write RUN/.deepspeed_env, readable only by its owner. Returns its absolute path, for `DS_ENV_FILE`."""
    run.mkdir(parents=True, exist_ok=True)
    path = (run / FILE).absolute()
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("".join(f"{name}={value}\n" for name, value in variables.items()))
    return path
