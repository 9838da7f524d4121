"""The hosts of a run, over ssh: are they well, and do ranks of the run still live there."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pretrain.cluster.remote import ssh_options

_ROOT = Path(__file__).resolve().parents[2]
# each GPU computes something; without one the import alone says that the environment is whole
_DEFAULT_CHECK = "import torch; [torch.ones(9, device=i).sum().item() for i in range(torch.cuda.device_count())]"
DEFAULT_HEALTH_COMMAND = shlex.join([sys.executable, "-c", _DEFAULT_CHECK])


@dataclass(frozen=True)
class Reach:
    """How to run a command on a host."""

    port: str | None = None  # of sshd; None: ssh's own choice
    timeout_s: float = 60.0  # for the connection and the command together


def run_on(host: str, command: str, reach: Reach) -> tuple[str, str]:
    """(standard output, what went wrong or "") of a shell command, in this process's folder on `host`."""
    here = host in ("localhost", socket.gethostname())
    script = f"cd {shlex.quote(os.getcwd())} && {command}"
    # PDSH_SSH_ARGS_APPEND: where users of pdsh, DeepSpeed's default, name their key or port
    options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    ssh = ["ssh", *ssh_options(), *options, *(["-p", reach.port] if reach.port else []), host, script]
    try:
        done = subprocess.run(["bash", "-c", script] if here else ssh, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=reach.timeout_s, start_new_session=True)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {reach.timeout_s:g} s"
    except OSError as error:
        return "", f"{error.filename}: {error.strerror}"
    if done.returncode == 0:
        return done.stdout, ""
    return done.stdout, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _on_all(hosts: Iterable[str], command: str, reach: Reach) -> dict[str, tuple[str, str]]:
    names = list(hosts)
    with ThreadPoolExecutor(max_workers=min(64, len(names) or 1)) as pool:
        return dict(zip(names, pool.map(lambda host: run_on(host, command, reach), names), strict=True))


def unhealthy(hosts: Iterable[str], command: str, reach: Reach) -> dict[str, str]:
    """What is wrong with each host that cannot be reached, or where the health command fails."""
    return {host: wrong for host, (_, wrong) in _on_all(hosts, command, reach).items() if wrong}


def ranks_on(hosts: Iterable[str], action: str, identity: Sequence[str], reach: Reach) -> dict[str, list[int]]:
    """"list", ask to "save", or "end" the run's ranks on each host: their process ids, where there are any.

    A host that does not answer is left out: the ranks there end by their own time-outs.
    """
    if not identity:
        return {}
    words = [sys.executable, "-m", "pretrain.resilience.processes", action, os.getcwd(), *identity]
    command = f"PYTHONPATH={shlex.quote(str(_ROOT))} {shlex.join(words)}"
    found = {host: [int(pid) for pid in out.split()] for host, (out, wrong) in _on_all(hosts, command, reach).items()
             if not wrong}
    return {host: pids for host, pids in found.items() if pids}
