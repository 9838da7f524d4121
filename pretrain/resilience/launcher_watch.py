"""Notice that the launcher of a rank has died, so that the rank does not continue as an orphan. Without torch."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pretrain.distributed.host import boot_id, is_running, pid_namespace, start_time
from pretrain.distributed.world import ALONE, World

LAUNCHER_VARIABLE = "DS_PRETRAIN_LAUNCHER"  # process id, start time, host and namespace of `ds-pretrain`
_POLL_S = 1.0
# Programs that start ranks or such launchers. Shells are not among them: a run in the background outlives its shell.
_PROGRAMS = {"deepspeed", "ds", "ds-pretrain", "torchrun", "mpirun", "mpiexec", "orterun", "orted", "prterun", "prte",
             "prted", "hydra_pmi_proxy", "srun", "slurmstepd"}
_MODULES = {"deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run",
            "torch.distributed.launch", "pretrain.cluster.ds_pretrain", "pretrain.cluster.without_torch"}
_FILES = {f"{module.replace('.', '/')}.py" for module in _MODULES}


@dataclass(frozen=True)
class _Launcher:
    pid: int
    started: int  # start time in clock ticks since boot: another process may get the same id later
    name: str


class LauncherWatch:
    """A thread that checks every second whether the launchers of this rank still run.

    Launchers are the nearest ancestor process that is a known launcher, and the launchers that started it: for plain
    `deepspeed`, its module `deepspeed.launcher.launch` and the `deepspeed` command. The process that called
    `launcher_variable` is another one. If one dies before `enable_save`, the thread ends this process, because there is
    nothing to save.
    """

    def __init__(self, world: World) -> None:
        self.lost = ""  # name of a launcher that has died; "": all run, or there is none
        self._can_save = False
        self._launchers = _find_launchers() if world.launcher != ALONE.launcher else []
        if self._launchers:
            threading.Thread(target=self._watch, name="launcher watch", daemon=True).start()

    def enable_save(self) -> None:
        """From now on only set `lost` when a launcher dies: the ranks then save and stop."""
        self._can_save = True

    def _watch(self) -> None:
        while not self.lost:
            time.sleep(_POLL_S)
            self.lost = next((launcher.name for launcher in self._launchers
                              if is_running(launcher.pid, launcher.started) is False), "")
        if not self._can_save:
            os._exit(128 + signal.SIGTERM)


def launcher_variable() -> dict[str, str]:
    """Return the variable by which ranks on this host watch this process. It also works if a launcher in between dies.
    """
    start = start_time(os.getpid())
    return {} if start is None else {LAUNCHER_VARIABLE: f"{os.getpid()}:{start}:{_namespace()}"}


def _namespace() -> str:
    """Identify the host (since its last boot) and the namespace in which process ids are valid."""
    return f"{boot_id()}:{pid_namespace()}"


def launcher_name(words: Sequence[str]) -> str:
    """Return the name of the launcher that a command line starts, or "" for any other program."""
    if not words:
        return ""
    name = Path(words[0]).name.partition(":")[0]  # slurmstepd writes "slurmstepd: [7.0]" over its command line
    if not name.startswith("python"):
        return name if name.partition(".")[0] in _PROGRAMS else ""  # mpirun.openmpi, mpiexec.hydra
    for at, word in enumerate(words[1:], 1):
        if word in ("-m", "-c"):
            return words[at + 1] if words[at + 1:] and words[at + 1] in _MODULES else ""
        if not word.startswith("-"):
            is_launcher = Path(word).name in _PROGRAMS or any(word.endswith(file) for file in _FILES)
            return Path(word).name if is_launcher else ""
    return ""


def _find_launchers() -> list[_Launcher]:
    """Return the process of LAUNCHER_VARIABLE, the nearest ancestor that is a launcher, and those directly above it."""
    found: list[_Launcher] = []
    pid, _, rest = os.environ.get(LAUNCHER_VARIABLE, "").partition(":")
    started, _, namespace = rest.partition(":")
    named = [_Launcher(int(pid), int(started), "ds-pretrain")] if pid and namespace == _namespace() else []
    for process in psutil.Process().parents():
        try:
            name = launcher_name(process.cmdline())
            start = start_time(process.pid)
        except (psutil.Error, OSError):
            break
        if name and start is not None:
            found.append(_Launcher(process.pid, start, name))
        elif found:
            break
    return named + found
