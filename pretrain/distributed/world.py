"""Rank and world size of this process, from the environment variables of its launcher.

Launchers are `deepspeed` and torchrun (RANK ...), Open MPI (OMPI_COMM_WORLD_*), MPICH and Intel MPI (PMI_*), SLURM's
srun (SLURM_*), and other MPI launchers (only PMIX_RANK; MPI itself provides the rest). torch reads only the variables
of `deepspeed` and torchrun. With another launcher each process would silently train alone, as rank 0 of 1.
"""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from pretrain.distributed.device import output_of
from pretrain.distributed.host import LAUNCHER_VARIABLES
from pretrain.distributed.process import free_port
from pretrain.errors import ConfigError, shorten

_RESOLVE_S = 60  # time for which several ranks wait until the name of rank 0's host is known
_SET_BOTH = "start the ranks with a launcher (deepspeed, torchrun, mpirun, srun), or unset both"
_FIRST_SPECIAL_STEP = 0xffffff00  # step ids from here on are those of shells and of SLURM's own processes
_STARTED_BY_TORCH = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}  # variables of torchrun and of DeepSpeed's launcher
_MPI_DAEMONS = ("orted", "orterun", "mpirun", "prted", "prterun", "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra")
DEFAULT_MASTER_PORT = "29500"  # torch's, DeepSpeed's and torchrun's


@dataclass(frozen=True)
class World:
    """Rank of this process and number of processes; `local_*` refer to this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


ALONE = World(rank=0, size=1, local_rank=0, local_size=1, launcher="none")


def integer_variable(environ: Mapping[str, str], name: str) -> int:
    """Return an environment variable as an integer. Raises ConfigError for other text, and for too large numbers."""
    try:
        value = int(environ[name])
        if abs(value) < 2**31:
            return value
    except ValueError:
        pass
    raise ConfigError(name, found=repr(environ[name]), expected="an integer in this environment variable")


def _slurm_local_size(environ: Mapping[str, str], name: str) -> int:
    """Return the number of tasks on this node. SLURM writes 2(x3),1 for three nodes with 2 tasks and one with 1."""
    node = integer_variable(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    earlier = 0  # nodes in the parts before
    for part in environ[name].split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if found is None:
            raise ConfigError(name, found=repr(environ[name]), expected="tasks per node, such as 2(x3),1")
        if earlier <= node < earlier + int(found[2] or 1):
            return int(found[1])
        earlier += int(found[2] or 1)
    raise ConfigError("SLURM_NODEID", found=node, expected=f"0 to {earlier - 1}, a node of {name}={environ[name]}")


def world_from_environment(environ: Mapping[str, str]) -> World:
    """Read rank and world size from the variables of the launcher; without a launcher return ALONE.

    A launcher's variables remain in the shells that it starts, and pass on to other launchers there. So the ranks of
    `deepspeed` and torchrun, which set a variable of their own, are theirs; otherwise variables of several ranks count
    before those of a single one.
    """
    alone: World | None = None
    for launcher, names in LAUNCHER_VARIABLES.items():
        try:
            world = _world_of(launcher, names, environ)
        except ConfigError:
            if alone is None:
                raise
            continue
        if alone is not None and launcher == "slurm" and not _srun_is_nearest():
            continue
        if world is not None and (world.size > 1 or (launcher == "torch" and _STARTED_BY_TORCH & environ.keys())):
            _reject_shell_of_several_tasks(world, environ)
            return world
        alone = alone or world
    if alone is not None:
        return alone
    if "PMIX_RANK" in environ and not _is_slurm_shell(environ):
        return _mpi_world(integer_variable(environ, "PMIX_RANK"))
    _reject_half_set(environ)
    return ALONE


def _world_of(launcher: str, names: tuple[str, str, str, str], environ: Mapping[str, str]) -> World | None:
    """Return the world that one launcher's variables describe; None if they are missing or describe no rank."""
    rank, size, local_rank, local_size = names
    if launcher == "slurm" and "SLURM_STEP_NUM_TASKS" in environ:
        size = "SLURM_STEP_NUM_TASKS"  # SLURM_NTASKS may be that of the allocation (srun --preserve-env)
    if rank not in environ or size not in environ:
        return None
    if launcher == "pmi" and _is_slurm_step(environ) and environ[rank] == environ.get("SLURM_PROCID"):
        return None  # srun --mpi=pmi2 also sets PMI_RANK, but only SLURM's variables have the local rank
    if launcher == "slurm" and not _is_slurm_step(environ):
        return None
    if launcher == "torch" and local_size not in environ:
        local_size = "LOCAL_SIZE"  # the name in DeepSpeed's launcher (launcher/launch.py, main, 0.19.8)
    read_local_size = _slurm_local_size if launcher == "slurm" else integer_variable
    world = World(rank=integer_variable(environ, rank), size=integer_variable(environ, size),
                  local_rank=integer_variable(environ, local_rank) if local_rank in environ else 0,
                  local_size=read_local_size(environ, local_size) if local_size in environ else 1,
                  launcher=launcher)
    if not 0 <= world.rank < world.size:
        raise ConfigError(rank, found=f"{world.rank} of {size}={world.size}", expected="0 <= rank < world size")
    if world.local_size < 1:
        raise ConfigError(local_size, found=world.local_size, expected="at least 1")
    if world.local_rank < 0 or (local_size in environ and world.local_rank >= world.local_size):
        raise ConfigError(local_rank, found=f"{world.local_rank} with {local_size}={world.local_size}",
                          expected="0 <= local rank < local world size")
    return world


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM's variables are those of a task of srun.

    A batch script, and the shell of `salloc` with use_interactive_step, have SLURM_PROCID, too, but are no ranks. The
    ids of such steps are words or the largest 32-bit numbers (slurm/slurm.h: 0xfffffffa is the interactive step).
    """
    step = environ.get("SLURM_STEP_ID", "")
    return step.isascii() and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _srun_is_nearest() -> bool:
    """Return whether no mpirun runs between srun and this process: on several nodes, srun starts mpirun's daemons."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if parent.name().startswith("slurmstepd"):
                return True
            if parent.name() in _MPI_DAEMONS:
                return False
    return True  # as in a container, which shows neither


def _is_slurm_shell(environ: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in environ and not _is_slurm_step(environ)


def _reject_shell_of_several_tasks(world: World, environ: Mapping[str, str]) -> None:
    """Raise ConfigError in the shell of `srun --pty -n N`, where nobody starts the other ranks.

    SLURM_TASK_PID is this process if srun itself has started it.
    """
    if world.launcher == "slurm" and "SLURM_PTY_PORT" in environ and environ.get("SLURM_TASK_PID") != str(os.getpid()) \
            and os.isatty(0):
        raise ConfigError("SLURM_PROCID", problem=f"this shell of `srun --pty` is the first of {world.size} tasks, and "
                          "the others have no terminal", remedy="for one rank or ds-pretrain, begin the command with "
                          f"`env -u SLURM_PROCID`; for {world.size} ranks, start it with srun from outside")


def _reject_half_set(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if only one of rank and world size is set: the process would silently train alone.

    SLURM sets the number of tasks in batch scripts, too, which are no ranks.
    """
    for launcher in ("torch", "openmpi", "pmi"):
        rank, size = LAUNCHER_VARIABLES[launcher][:2]
        if rank in environ:
            raise ConfigError(size, problem=f"{rank} is set, and this variable is not", remedy=_SET_BOTH)
        if size in environ and integer_variable(environ, size) != 1:
            raise ConfigError(rank, problem=f"{size} is {environ[size]}, and this variable is not set",
                              remedy=_SET_BOTH)


def _check_address(environ: Mapping[str, str], world: World) -> None:
    """Raise ConfigError for a port or an address that torch would crash with, or wait for without end.

    A host of a new cluster may get its name while its ranks start.
    """
    port = environ["MASTER_PORT"]
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16):
        raise ConfigError("MASTER_PORT", found=repr(port), expected="a port from 1 to 65535")
    address, end = environ["MASTER_ADDR"], time.monotonic() + (_RESOLVE_S if world.size > 1 else 0)
    waits = False
    while True:
        try:
            socket.getaddrinfo(address or "empty.invalid", int(port))
            return
        except (OSError, UnicodeError, ValueError) as error:
            if time.monotonic() >= end or not isinstance(error, OSError):
                reason = getattr(error, "strerror", None) or error
                raise ConfigError("MASTER_ADDR", problem=f"the host {shorten(address)!r} of rank 0 is not known "
                                  f"({reason})", remedy="set it to a name or address of this host") from None
            if world.rank == 0 and not waits:
                print(f"ds-pretrain: MASTER_ADDR: the name {shorten(address)!r} is not known yet; trying again for up "
                      f"to {_RESOLVE_S} s", file=sys.stderr, flush=True)
            waits = True
        time.sleep(1)


def _mpi() -> Any:
    """Return mpi4py's MPI module. If several MPI libraries are installed, choose the launcher's."""
    if any(name.startswith("OMPI_") for name in os.environ):
        os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
    from mpi4py import MPI

    return MPI


def _mpi_world(rank: int) -> World:
    """Return the world of a launcher that sets only the rank; MPI provides the rest."""
    try:
        ranks = _mpi().COMM_WORLD
        if ranks.Get_rank() != rank:
            raise RuntimeError(f"the MPI library reports rank {ranks.Get_rank()}")
    except (ImportError, RuntimeError) as error:
        raise ConfigError("PMIX_RANK", problem=f"mpi4py cannot get the world size of rank {rank} ({error})",
                          remedy="use the launcher's MPI library, or set RANK, WORLD_SIZE and LOCAL_RANK") from None
    host = ranks.Split_type(_mpi().COMM_TYPE_SHARED)
    return World(rank=ranks.Get_rank(), size=ranks.Get_size(), local_rank=host.Get_rank(), local_size=host.Get_size(),
                 launcher="mpi")


def _mpi_head_address(world: World) -> str:
    """Return the first address of rank 0's host, broadcast by MPI; collective."""
    try:
        ranks = _mpi().COMM_WORLD
        if ranks.Get_size() != world.size:
            raise RuntimeError(f"the MPI library reports {ranks.Get_size()} ranks, the launcher {world.size}")
        mine = (output_of("hostname", "-I") or "").split()
        return str(ranks.bcast(mine[0] if mine else socket.gethostname()))
    except (ImportError, RuntimeError) as error:
        raise ConfigError("MASTER_ADDR", problem=f"mpi4py cannot find the address of rank 0's host ({error})",
                          remedy="export it before mpirun (for example mpirun -x MASTER_ADDR=...)") from None


def _slurm_head_address(node_list: str) -> str:
    """Return the address by which SLURM reaches the first node, whose name may not resolve."""
    names = (output_of("scontrol", "show", "hostnames", node_list) or "").split()
    found = (output_of("sinfo", "--noheader", "--nodes", *names[:1], "--format", "%o") or "").split() if names else []
    if not found:
        raise ConfigError("MASTER_ADDR", problem="scontrol and sinfo give no address for the first of "
                          f"{shorten(node_list)!r}", remedy="export MASTER_ADDR before srun")
    return found[0]


def export_world(world: World, environ: MutableMapping[str, str]) -> None:
    """Set the variables that torch and DeepSpeed read, unless the launcher has set them."""
    environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.local_rank))
    environ.setdefault("LOCAL_WORLD_SIZE", str(world.local_size))
    environ.setdefault("LOCAL_SIZE", environ["LOCAL_WORLD_SIZE"])
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:  # DeepSpeed 0.19.8 asserts that both are equal (runtime/engine.py)
        environ["OMPI_COMM_WORLD_LOCAL_RANK"] = environ["LOCAL_RANK"]
    if "TORCHELASTIC_RUN_ID" not in environ or world.launcher != "torch":
        environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # a shell's variable: no agent runs the store
    if world.launcher == "none":
        environ["MASTER_ADDR"] = "127.0.0.1"  # the address of a shell, such as a pod of PyTorchJob, may be another host
    if world.size == 1:
        environ.setdefault("MASTER_PORT", str(free_port()))  # no other process needs to know it
    environ.setdefault("MASTER_PORT", DEFAULT_MASTER_PORT)
    if "MASTER_ADDR" not in environ:
        if world.launcher == "slurm" and world.size > 1:
            nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
            environ["MASTER_ADDR"] = _slurm_head_address(nodes)
        elif world.size == world.local_size or world.size == 1:
            environ["MASTER_ADDR"] = "127.0.0.1"
        else:
            environ["MASTER_ADDR"] = _mpi_head_address(world)


def running_environment() -> World:
    """Return the world of this process, and export its variables for torch and DeepSpeed."""
    world = world_from_environment(os.environ)
    export_world(world, os.environ)
    _check_address(os.environ, world)
    return world
