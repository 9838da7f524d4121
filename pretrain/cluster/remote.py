"""Ask every host the same question at the same time: ssh (or srun), that host's Python, and the text of probe.py."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pretrain.cluster import probe

CONNECT_TIMEOUT_S = 8
Reach = Callable[[str, str], list[str]]  # (host, shell command) -> the words that run it there


class HostError(Exception):
    """A host gave no answer; the text says why, in a few words."""


def ssh_options() -> list[str]:
    """No questions at the terminal, and a host that has gone is noticed: within 8 s at first, 30 s later."""
    return ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=10",
            "-o", "ServerAliveCountMax=3"]


def by_ssh(port: int | None = None) -> Reach:
    """Hosts that are reached as DeepSpeed's pdsh reaches them."""
    options = [*ssh_options(), *(["-p", str(port)] if port else [])]
    return lambda host, command: ["ssh", *options, host, command]


def here(host: str, command: str) -> list[str]:
    """The one host that this process runs on."""
    return ["sh", "-c", command]


def by_srun(host: str, command: str) -> list[str]:
    """Hosts of the SLURM job that this process belongs to; they need not allow ssh."""
    return ["srun", "--overlap", "-N1", "-n1", "-w", host, "sh", "-c", command]


def ask(reach: Reach, host: str, question: str, *words: Any, timeout_s: float = 15) -> Any:
    """What probe.py's function `question` returns on `host`. Raises HostError."""
    program = f"{Path(probe.__file__).read_text(encoding='utf-8')}\n" \
              f"answer({question!r}, *json.loads({json.dumps(words)!r}))\n"
    command = reach(host, f"{shlex.quote(sys.executable)} -")
    try:
        done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise HostError(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise HostError(f"{command[0]}: {error.strerror}") from None
    try:
        return json.loads(done.stdout.splitlines()[-1])  # a login script may print before
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or [f"{command[0]} ended with exit code {done.returncode}"])[-1]
        if done.returncode in (126, 127):
            raise HostError(f"no Python at {sys.executable}") from None
        raise HostError(f"no {command[0]} to it ({said})" if done.returncode == 255 else said) from None


def ask_all(reach: Reach, questions: Mapping[str, Sequence[Any]], timeout_s: float = 15) -> dict[str, Any]:
    """Host -> its answer, or the HostError; all are asked at once. `questions`: host -> (question, words...)."""
    def one(host: str) -> Any:
        try:
            return ask(reach, host, *questions[host], timeout_s=timeout_s)
        except HostError as error:
            return error

    with ThreadPoolExecutor(max(len(questions), 1)) as pool:
        return dict(zip(questions, pool.map(one, questions), strict=True))
