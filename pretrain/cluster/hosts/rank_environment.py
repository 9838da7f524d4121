"""What ranks on other hosts need in their environment: `deepspeed` forwards little beyond its `.deepspeed_env` file."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from pretrain.cluster.hosts.preflight import Facts
from pretrain.cluster.hosts.probe import JOB_VARIABLE
from pretrain.errors import ConfigError

FILE = ".deepspeed_env"
FORWARDED = ("GLOO_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_",
             "OMP_", "MKL_", "KMP_", "DS_", "DEEPSPEED_", "CUDA_DEVICE_", "CUDA_LAUNCH_", "FI_", "UCX_",
             "LD_LIBRARY_PATH")
_SECRETS = re.compile(r"TOKEN$|KEY$|SECRET|PASSWORD")  # a command line on each host would show them
_SAFE_VALUE = re.compile(r"[\w@%+=:,./ -]*")  # survives the quoting of each of DeepSpeed's launchers


def own_variables(environ: Mapping[str, str], folders: list[Path]) -> dict[str, str]:
    """The user's: those of the shell that a training run may read, then the `.deepspeed_env` files of `folders`.

    Raises ConfigError for a line that is no NAME=VALUE; blank lines and comments, which DeepSpeed trips over, are fine.
    """
    found = {name: value for name, value in environ.items() if name.startswith(FORWARDED)
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


def interface_variables(facts: Mapping[str, Facts]) -> dict[str, str]:
    """GLOO_ and NCCL_SOCKET_IFNAME, from the interfaces over which the hosts reach one another.

    gloo wants one name that each host has: where the names differ each rank chooses its own when it starts.
    """
    names = list(dict.fromkeys(found.interface[0] for found in facts.values() if found.interface))
    if not names:
        return {}
    return {"NCCL_SOCKET_IFNAME": ",".join(names)} | ({"GLOO_SOCKET_IFNAME": names[0]} if len(names) == 1 else {})


def threads(facts: Mapping[str, Facts], slots: Mapping[str, int]) -> int:
    """OMP_NUM_THREADS: the cores of a rank, on the host that has the fewest."""
    return max(1, min(found.cores // slots[host] for host, found in facts.items()))


def run_variables(facts: Mapping[str, Facts], slots: Mapping[str, int], own: Mapping[str, str],
                  job: str) -> dict[str, str]:
    """All variables of the ranks, the user's own winning over what was found out."""
    return {"OMP_NUM_THREADS": str(threads(facts, slots)), **interface_variables(facts), **own, JOB_VARIABLE: job}


def launcher_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's, for a `deepspeed` that it starts: with `variables`, and with its own scripts found first."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **variables, "PATH": path}


def write_environment(run: Path, variables: Mapping[str, str]) -> Path:
    """Write RUN/.deepspeed_env, for `DS_ENV_FILE`, readable by its owner alone. Returns its absolute path."""
    run.mkdir(parents=True, exist_ok=True)
    path = (run / FILE).absolute()
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("".join(f"{name}={value}\n" for name, value in variables.items()))
    return path
