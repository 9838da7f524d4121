"""The hosts of a run: are they well, and do ranks of the run still live there."""

import os
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pretrain.cluster.hosts.remote import HostError, Reach, by_ssh, here, last_words, on_all, run

LOCAL = "localhost"
_ROOT = Path(__file__).resolve().parents[3]
_TIMEOUT_S = 60.0  # for the connection and the command together
# each GPU computes something; without one the import alone says that the environment is whole
_DEFAULT_CHECK = "import torch; [torch.ones(9, device=i).sum().item() for i in range(torch.cuda.device_count())]"
DEFAULT_HEALTH_COMMAND = shlex.join([sys.executable, "-c", _DEFAULT_CHECK])


def reach_hosts(port: int | str | None = None) -> Reach:
    """Others by ssh; this host itself needs no sshd."""
    over_ssh, own_names = by_ssh(port), (LOCAL, socket.gethostname())
    return lambda host, command: (here if host in own_names else over_ssh)(host, command)


def _run_on(host: str, command: str, reach: Reach, timeout_s: float) -> str:
    """Standard output of a shell command, in this process's folder on `host`. Raises HostError where it fails."""
    done = run(reach, host, f"cd {shlex.quote(os.getcwd())} && {command}", timeout_s=timeout_s)
    if done.returncode != 0:
        raise HostError(last_words(done))
    return done.stdout


def unhealthy(hosts: Iterable[str], command: str, reach: Reach, timeout_s: float) -> dict[str, str]:
    """What is wrong with each host that cannot be reached, or where the health command fails."""
    answers = on_all(hosts, lambda host: _run_on(host, command, reach, timeout_s))
    return {host: str(answer) for host, answer in answers.items() if isinstance(answer, HostError)}


def ranks_on(hosts: Iterable[str], action: str, identity: Sequence[str], reach: Reach) -> dict[str, list[int]]:
    """"list", ask to "save", or "end" the run's ranks on each host: their process ids, where there are any.

    A host that does not answer is left out: the ranks there end by their own time-outs.
    """
    if not identity:
        return {}
    words = [sys.executable, "-m", "pretrain.cluster.supervise.processes", action, os.getcwd(), *identity]
    command = f"PYTHONPATH={shlex.quote(str(_ROOT))} {shlex.join(words)}"
    answers = on_all(hosts, lambda host: _run_on(host, command, reach, _TIMEOUT_S))
    return {host: [int(pid) for pid in answer.split()] for host, answer in answers.items()
            if isinstance(answer, str) and answer.split()}
