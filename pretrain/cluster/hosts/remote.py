"""Run commands, and functions of probe.py, on all hosts of a run at the same time.

The source of probe.py is sent to each host's Python over ssh or srun, so the host does not need this package.
"""

import inspect
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

from pretrain.child import WITHOUT_WORKING_FOLDER
from pretrain.cluster.hosts import probe
from pretrain.distributed import host as host_facts

LOCAL = "localhost"
CONNECT_TIMEOUT_S = 8
_RANKS_TIMEOUT_S = 60.0  # time for the connection, and to end ranks
# Compute on each GPU. On a host without GPUs, the import of torch shows that the Python environment works.
_DEFAULT_CHECK = "import torch; [torch.ones(9, device=i).sum().item() for i in range(torch.cuda.device_count())]"
DEFAULT_HEALTH_COMMAND = shlex.join([sys.executable, "-c", WITHOUT_WORKING_FOLDER + _DEFAULT_CHECK])
T = TypeVar("T")
Transport = Callable[[str, str], list[str]]  # (host, shell command) -> local command that runs it on that host

_MOST_CONNECTIONS = 128  # at the same time: each is a process with three pipes, and 1,024 files may be open
# This program creates the modules from their sources: the host may not have this package, or another version of it.
_PROGRAM = WITHOUT_WORKING_FOLDER + """
import json, sys, types
for name, source in {sources!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(source, module.__dict__)
print(json.dumps(getattr(sys.modules[{module!r}], {function!r})(*json.loads({args!r}))), flush=True)
"""


class HostError(Exception):
    """A host could not be reached, or a command failed on it. The error's text is the reason."""


def ssh_options() -> list[str]:
    """Return ssh options: no prompts, 8 s to connect, and an error after 30 s without an answer of the host."""
    return ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=10",
            "-o", "ServerAliveCountMax=3"]


def ssh_transport(port: int | str | None = None) -> Transport:
    """Run commands by ssh, with the options of the variable PDSH_SSH_ARGS_APPEND (key, user, port), as pdsh does."""
    user_options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    options = [*ssh_options(), *user_options, *(["-p", str(port)] if port else [])]
    return lambda host, command: ["ssh", *options, host, command]


def local_transport(host: str, command: str) -> list[str]:
    """Run the command on this host. `host` is ignored."""
    return ["sh", "-c", command]


def srun_transport(host: str, command: str) -> list[str]:
    """Run the command by srun on a host of the current SLURM job, without ssh."""
    return ["srun", "--overlap", "-N1", "-n1", "-w", host, "sh", "-c", command]


def default_transport(port: int | str | None = None) -> Transport:
    """Return a transport that runs commands on this host without ssh, and on other hosts by ssh."""
    ssh, local_names = ssh_transport(port), (LOCAL, socket.gethostname())
    return lambda host, command: (local_transport if host in local_names else ssh)(host, command)


def run_on_host(transport: Transport, host: str, command: str, *, stdin: str = "",
                timeout_s: float = 15) -> "subprocess.CompletedProcess[str]":
    """Run a shell command on `host` and wait until it has ended.

    Raises HostError if the command cannot be started or takes too long. A command that fails raises nothing.
    """
    words = transport(host, command)
    try:
        return subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout_s,
                              start_new_session=True)
    except subprocess.TimeoutExpired:
        raise HostError(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise HostError(f"{words[0]}: {error.strerror}") from None


def failure_reason(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last line of a failed command's stderr, or its exit code if stderr is empty."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def call_probe(transport: Transport, host: str, function: str, *args: Any, timeout_s: float = 15,
               module: ModuleType = probe) -> Any:
    """Call a function of probe.py, or of another module without imports of this package, by its name on `host`.

    Returns its result. Raises HostError.
    """
    sources = {each.__name__: inspect.getsource(each) for each in (host_facts, probe, module)}
    program = _PROGRAM.format(sources=sources, module=module.__name__, function=function, args=json.dumps(args))
    done = run_on_host(transport, host, f"{shlex.quote(sys.executable)} -", stdin=program, timeout_s=timeout_s)
    try:
        return json.loads(done.stdout.splitlines()[-1])  # the last line: a login script may print before it
    except (ValueError, IndexError):
        if done.returncode in (126, 127):
            raise HostError(f"there is no Python at {sys.executable}") from None
        reason = failure_reason(done)
        raise HostError(f"ssh failed ({reason})" if done.returncode == 255 else reason) from None


def call_on_all(hosts: Iterable[str], function: Callable[[str], T]) -> dict[str, T | HostError]:
    """Call `function(host)` for all hosts, for many of them in parallel. Returns host -> result or HostError."""
    names = list(hosts)

    def call(host: str) -> T | HostError:
        try:
            return function(host)
        except HostError as error:
            return error

    with ThreadPoolExecutor(min(max(len(names), 1), _MOST_CONNECTIONS)) as pool:
        return dict(zip(names, pool.map(call, names), strict=True))


def unhealthy_hosts(hosts: Iterable[str], command: str, transport: Transport, timeout_s: float) -> dict[str, str]:
    """Return host -> problem, for each host that cannot be reached or on which the health command fails."""
    def check(host: str) -> str:
        done = run_on_host(transport, host, f"cd {shlex.quote(os.getcwd())} && {command}", timeout_s=timeout_s)
        return "" if done.returncode == 0 else failure_reason(done)

    return {host: str(answer) for host, answer in call_on_all(hosts, check).items() if answer}


def ranks_on(hosts: Iterable[str], action: str, flags: Sequence[str], transport: Transport) -> dict[str, list[int]]:
    """Call `probe.ranks_of_run` on the hosts, with this process's working folder. Returns host -> process ids.

    Hosts without such ranks are left out, and hosts that do not answer: their ranks end when their collectives time
    out. With `flags` [], nothing is done.
    """
    if not flags:
        return {}
    answers = call_on_all(hosts, lambda host: call_probe(transport, host, "ranks_of_run", action, os.getcwd(),
                                                         list(flags), timeout_s=_RANKS_TIMEOUT_S))
    return {host: answer for host, answer in answers.items() if answer and not isinstance(answer, HostError)}
