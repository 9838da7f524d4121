"""Environment variables of the ranks on other hosts.

`deepspeed` forwards only a few variables of the shell, and all variables of its file `.deepspeed_env`.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from pretrain.cli import say
from pretrain.cluster.hosts.preflight import HostFacts
from pretrain.cluster.hosts.probe import JOB_VARIABLE
from pretrain.distributed.host import RANK_OF_SHELL
from pretrain.errors import ConfigError

FILE = ".deepspeed_env"
_FORWARDED_PREFIXES = (
    "GLOO_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_",
    "TORCHDYNAMO_", "ONEDNN_", "DNNL_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "MKL_", "KMP_", "DS_", "DEEPSPEED_",
    "CUDA_DEVICE_", "CUDA_LAUNCH_", "FI_", "UCX_", "LD_LIBRARY_PATH")
# Names that are not forwarded: other users could read the values in the command lines on the hosts.
_SECRETS = re.compile(r"TOKEN$|KEY$|SECRET|PASSWORD")
# Values that DeepSpeed does not put in double quotes (0.19.8: launcher/multinode_runner.py, add_export). pdsh passes
# the quotes to a shell, which removes them. With the other launchers they become a part of the value.
_UNQUOTED = re.compile(r"[\w@%+=:,./-]*")
# Variables of the shell that the `deepspeed` command exports to all hosts without its file (launcher/runner.py, main)
_EXPORTED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")


def user_variables(environ: Mapping[str, str], folders: list[Path], launcher: str = "pdsh") -> dict[str, str]:
    """Return the variables that the user has set: in the shell, if they affect training, and in `.deepspeed_env`.

    The file of a later folder overrides earlier folders and the shell. It may have blank lines and comments, on which
    DeepSpeed fails. Raises ConfigError for a line that is not NAME=VALUE.
    """
    found = {name: value for name, value in environ.items() if name.startswith(_FORWARDED_PREFIXES)
             and not _SECRETS.search(name) and "\n" not in value and name != "DS_ENV_FILE"}
    if launcher != "pdsh":
        changed = [name for name, value in found.items() if not _UNQUOTED.fullmatch(value)]
        for name in changed:
            del found[name]
        if changed:
            say(f"note: the ranks do not get {', '.join(changed)}: --launcher {launcher} would change the values")
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
    """Return NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: the network interfaces that connect the hosts.

    NCCL accepts several names, gloo only one. If the hosts' names differ, GLOO_SOCKET_IFNAME is not set here: each rank
    sets it when it starts (distributed/process_group.py).
    """
    names = list(dict.fromkeys(found.interface[0] for found in facts.values() if found.interface))
    if not names:
        return {}
    return {"NCCL_SOCKET_IFNAME": ",".join(names)} | ({"GLOO_SOCKET_IFNAME": names[0]} if len(names) == 1 else {})


def threads_per_rank(facts: Mapping[str, HostFacts], ranks: Mapping[str, int]) -> int:
    """Return OMP_NUM_THREADS: the number of cores per rank, on the host with the fewest cores per rank."""
    return max(1, min(found.cores // ranks[host] for host, found in facts.items()))


def rank_variables(facts: Mapping[str, HostFacts], ranks: Mapping[str, int], user: Mapping[str, str],
                   job: str) -> dict[str, str]:
    """Return the variables that all ranks get. The user's variables override the computed ones, except JOB_VARIABLE."""
    return {"OMP_NUM_THREADS": str(threads_per_rank(facts, ranks)), **interface_variables(facts), **user,
            JOB_VARIABLE: job}


def quote_variables(launcher: str, variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for DeepSpeed's file, so that the ranks get the values unchanged. Raises ConfigError.

    pdsh passes a shell command to the hosts, in which DeepSpeed writes the values in double quotes. There a shell would
    run $(...). The file has precedence over the variables that DeepSpeed exports from `environ`, so it also gets those
    of them that need quotes, and PYTHONPATH, at whose beginning DeepSpeed puts the working folder (launcher/runner.py).
    """
    exported = {name: value for name, value in environ.items()
                if name.startswith(_EXPORTED_PREFIXES) and not _UNQUOTED.fullmatch(value)}
    found = {**exported, "PYTHONPATH": environ.get("PYTHONPATH", ""), **variables}
    for name, value in found.items():
        if "\n" in value or (launcher != "pdsh" and not _UNQUOTED.fullmatch(value)):
            raise ConfigError(name, problem=f"--launcher {launcher} would change the value {value!r} of this variable",
                              remedy=f"change it in {FILE} or in the shell, to letters, digits and @%+=:,./- only")
    return {name: re.sub(r'([\\$`"])', r"\\\1", value).replace("%", "%%") if launcher == "pdsh" else value
            for name, value in found.items()}


def launcher_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with `variables` added. PATH begins with this Python's folder.

    DeepSpeed starts its launcher with `python -m` in the working folder. With PYTHONSAFEPATH (Python 3.11), which
    DeepSpeed exports, that imports no modules of this folder. The rank that this process has in the job or shell that
    started it is left out: its ranks get others.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    own = {name: value for name, value in os.environ.items() if name not in RANK_OF_SHELL}
    return {**own, "PYTHONSAFEPATH": "1", **variables, "PATH": path}


def write_environment(run: Path, variables: Mapping[str, str]) -> Path:
    """Write RUN/.deepspeed_env, readable only by its owner. Returns its absolute path, for `DS_ENV_FILE`."""
    run.mkdir(parents=True, exist_ok=True)
    path = (run / FILE).absolute()
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("".join(f"{name}={value}\n" for name, value in variables.items()))
    return path
