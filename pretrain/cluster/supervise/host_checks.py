"""Check that the hosts of a run are healthy, and list, signal or end the run's ranks on these hosts."""

import os
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pretrain.cluster.hosts.remote import (
    HostError,
    Transport,
    call_on_all,
    failure_reason,
    local_transport,
    run_on_host,
    ssh_transport,
)

LOCAL = "localhost"
_ROOT = Path(__file__).resolve().parents[3]
_TIMEOUT_S = 60.0  # for the connection and the command together
# Compute on each GPU. On a host without GPUs, the import of torch shows that the Python environment works.
_DEFAULT_CHECK = "import torch; [torch.ones(9, device=i).sum().item() for i in range(torch.cuda.device_count())]"
DEFAULT_HEALTH_COMMAND = shlex.join([sys.executable, "-c", _DEFAULT_CHECK])


def default_transport(port: int | str | None = None) -> Transport:
    """Return a transport that runs commands on this host without ssh, and on other hosts by ssh."""
    ssh, local_names = ssh_transport(port), (LOCAL, socket.gethostname())
    return lambda host, command: (local_transport if host in local_names else ssh)(host, command)


def unhealthy_hosts(hosts: Iterable[str], command: str, transport: Transport, timeout_s: float) -> dict[str, str]:
    """Return host -> problem, for each host that cannot be reached or on which the health command fails."""
    answers = call_on_all(hosts, lambda host: _run_in_this_folder(host, command, transport, timeout_s))
    return {host: str(answer) for host, answer in answers.items() if isinstance(answer, HostError)}


def ranks_on(hosts: Iterable[str], action: str, identity: Sequence[str],
             transport: Transport) -> dict[str, list[int]]:
    """List, signal or end the run's ranks on the hosts. Returns host -> process ids, for the hosts with such ranks.

    Hosts that do not answer are left out. Their ranks end when their collectives time out.

    Args:
        hosts: hosts to ask.
        action: "list", "save" (ask the ranks to save and stop) or "end".
        identity: see `launch_command.identity`; with [] nothing is done.
        transport: runs a command on a host.
    """
    if not identity:
        return {}
    words = [sys.executable, "-m", "pretrain.cluster.supervise.processes", action, os.getcwd(), *identity]
    command = f"PYTHONPATH={shlex.quote(str(_ROOT))} {shlex.join(words)}"
    answers = call_on_all(hosts, lambda host: _run_in_this_folder(host, command, transport, _TIMEOUT_S))
    return {host: [int(pid) for pid in answer.split()] for host, answer in answers.items()
            if isinstance(answer, str) and answer.split()}


def _run_in_this_folder(host: str, command: str, transport: Transport, timeout_s: float) -> str:
    """Run a shell command on `host`, in the working folder of this process. Returns its stdout. Raises HostError."""
    done = run_on_host(transport, host, f"cd {shlex.quote(os.getcwd())} && {command}", timeout_s=timeout_s)
    if done.returncode != 0:
        raise HostError(failure_reason(done))
    return done.stdout
