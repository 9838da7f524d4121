"""Ask every host the same question at the same time: ssh (or srun), that host's Python, and the text of probe.py."""

import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pretrain.cluster.hosts import probe
from pretrain.distributed import host as host_facts

CONNECT_TIMEOUT_S = 8
Answer = TypeVar("Answer")
Reach = Callable[[str, str], list[str]]  # (host, shell command) -> the words that run it there

# Creates the modules from their texts, because the host may lack this checkout or have another version of it.
_PROGRAM = """
import json, sys, types
for name, source in {sources!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(source, module.__dict__)
sys.modules[{probe!r}].answer({question!r}, *json.loads({words!r}))
"""


class HostError(Exception):
    """A host gave no answer; the text says why, in a few words."""


def ssh_options() -> list[str]:
    """No questions at the terminal, and a host that has gone is noticed: within 8 s at first, 30 s later."""
    return ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=10",
            "-o", "ServerAliveCountMax=3"]


def by_ssh(port: int | str | None = None) -> Reach:
    """Hosts that are reached as DeepSpeed's pdsh reaches them: PDSH_SSH_ARGS_APPEND names a key, a user, a port."""
    own = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    options = [*ssh_options(), *own, *(["-p", str(port)] if port else [])]
    return lambda host, command: ["ssh", *options, host, command]


def here(host: str, command: str) -> list[str]:
    """The one host that this process runs on."""
    return ["sh", "-c", command]


def by_srun(host: str, command: str) -> list[str]:
    """Hosts of the SLURM job that this process belongs to; they need not allow ssh."""
    return ["srun", "--overlap", "-N1", "-n1", "-w", host, "sh", "-c", command]


def run(reach: Reach, host: str, command: str, *, text: str = "",
        timeout_s: float = 15) -> "subprocess.CompletedProcess[str]":
    """Run a shell command on `host` to its end, with `text` as its standard input. Raises HostError for no answer."""
    words = reach(host, command)
    try:
        return subprocess.run(words, input=text, capture_output=True, text=True, timeout=timeout_s,
                              start_new_session=True)
    except subprocess.TimeoutExpired:
        raise HostError(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise HostError(f"{words[0]}: {error.strerror}") from None


def last_words(done: "subprocess.CompletedProcess[str]") -> str:
    """Why a command failed, as far as it said."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def ask(reach: Reach, host: str, question: str, *words: Any, timeout_s: float = 15) -> Any:
    """What probe.py's function `question` returns on `host`. Raises HostError."""
    sources = {module.__name__: inspect.getsource(module) for module in (host_facts, probe)}
    program = _PROGRAM.format(sources=sources, probe=probe.__name__, question=question, words=json.dumps(words))
    done = run(reach, host, f"{shlex.quote(sys.executable)} -", text=program, timeout_s=timeout_s)
    try:
        return json.loads(done.stdout.splitlines()[-1])  # a login script may print before
    except (ValueError, IndexError):
        if done.returncode in (126, 127):
            raise HostError(f"no Python at {sys.executable}") from None
        raise HostError(f"no ssh to it ({last_words(done)})" if done.returncode == 255 else last_words(done)) from None


def on_all(hosts: Iterable[str], call: Callable[[str], Answer]) -> dict[str, Answer | HostError]:
    """Host -> what `call` returns for it, or the HostError that it raises; all at the same time."""
    names = list(hosts)

    def one(host: str) -> Answer | HostError:
        try:
            return call(host)
        except HostError as error:
            return error

    with ThreadPoolExecutor(max(len(names), 1)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def ask_all(reach: Reach, questions: Mapping[str, Sequence[Any]], timeout_s: float = 15) -> dict[str, Any]:
    """Host -> its answer, or the HostError; all are asked at once. `questions`: host -> (question, words...)."""
    return on_all(questions, lambda host: ask(reach, host, *questions[host], timeout_s=timeout_s))
