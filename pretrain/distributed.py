"""Environment -> ranks, process-group set-up, and output that only rank 0 prints.

Ranks come from whichever launcher started us: `deepspeed`/torchrun (RANK ...), Open MPI (OMPI_COMM_WORLD_*),
MPICH and Intel MPI (PMI_*), or SLURM's srun (SLURM_*). torch itself reads only the first kind; a job started by
the others would otherwise train N times alone as rank 0 of 1, without a word.
"""

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import cpuinfo

from pretrain.device import Device
from pretrain.errors import ConfigError

DEFAULT_MASTER_PORT = "29500"
# (rank, world size, local rank, local world size) of each kind of launcher, in order of precedence
_LAUNCHERS = {
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


@dataclass(frozen=True)
class World:
    """This process's place among all of them. `local_*` counts the processes of this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name].split("(")[0].split(",")[0])  # SLURM writes 2(x3),1
    except ValueError:
        raise ConfigError(name, found=repr(environ[name]), expected="an integer in this environment variable") from None


def world_from_environment(environ: Mapping[str, str]) -> World:
    """Rank and world size as the launcher wrote them; a world of one where no launcher did.

    A batch shell of SLURM (SLURM_PROCID set, no step) counts as no launcher: only srun's steps have ranks.
    """
    for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
        if rank not in environ or size not in environ:
            continue
        if launcher == "pmi" and local_rank not in environ and "SLURM_LOCALID" in environ:
            continue  # srun --mpi=pmi2 sets PMI_RANK too, but only SLURM's variables know the place on the host
        if launcher == "slurm" and environ.get("SLURM_STEP_ID", "batch") in ("batch", "extern", "4294967291"):
            continue
        world = World(rank=_integer(environ, rank), size=_integer(environ, size),
                      local_rank=_integer(environ, local_rank) if local_rank in environ else 0,
                      local_size=_integer(environ, local_size) if local_size in environ else 1, launcher=launcher)
        if not 0 <= world.rank < world.size:
            raise ConfigError(rank, found=f"{world.rank} of {size}={world.size}", expected="0 <= rank < world size")
        return world
    return World(rank=0, size=1, local_rank=0, local_size=1, launcher="none")


def _slurm_head_node(node_list: str) -> str:
    try:
        names = subprocess.run(["scontrol", "show", "hostnames", node_list], check=True, capture_output=True, text=True)
        return names.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise ConfigError("MASTER_ADDR", found=f"unset, and scontrol cannot expand {node_list!r}",
                          expected="the address of the first node", remedy="export MASTER_ADDR before srun") from None


def export_world(world: World, environ: MutableMapping[str, str]) -> None:
    """Write the variables that torch and DeepSpeed read, where the launcher left them unset."""
    environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.local_rank))
    environ.setdefault("LOCAL_WORLD_SIZE", str(world.local_size))
    environ.setdefault("LOCAL_SIZE", environ["LOCAL_WORLD_SIZE"])
    environ.setdefault("MASTER_PORT", DEFAULT_MASTER_PORT)
    if "MASTER_ADDR" not in environ:
        if world.launcher == "slurm" and world.size > 1:
            environ["MASTER_ADDR"] = _slurm_head_node(environ.get("SLURM_STEP_NODELIST", environ["SLURM_NODELIST"]))
        elif world.size == world.local_size or world.size == 1:
            environ["MASTER_ADDR"] = "127.0.0.1"
        else:
            raise ConfigError("MASTER_ADDR", found="unset", expected="the address of rank 0's host",
                              remedy="export it before mpirun (for example mpirun -x MASTER_ADDR=...)")


def prepare_deepspeed(device: Device) -> None:
    """To be called before DeepSpeed is imported: name the accelerator, which it would otherwise guess with a warning;
    put this environment's `ninja` first: another one would compile all operators anew, in every run; and let it ask
    for the CPU's features once: it does for each operator, a second each.
    """
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    os.environ.setdefault("DS_ACCELERATOR", device.kind)
    scripts = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != scripts:
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])


def init_process_group(world: World) -> None:
    """Form the process group; every rank checks that it has the size that the launcher promised."""
    import deepspeed
    import torch.distributed
    from deepspeed.accelerator import get_accelerator

    from pretrain.upstream import remove_shared_memory_names

    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError("MASTER_PORT", found=f"{os.environ['MASTER_PORT']}, which another program listens on",
                          expected="a free port on rank 0's host", remedy="deepspeed --master_port N") from None
    if get_accelerator().device_name() == "cpu":
        remove_shared_memory_names(world.rank)
    else:
        get_accelerator().set_device(world.local_rank)
    formed = torch.distributed.get_world_size()
    if formed != world.size:
        raise ConfigError("world size", found=formed, expected=f"{world.size}, as {world.launcher} says")


def print_error(world: World, error: Exception) -> None:
    """The one line of a refused run, from each host: what is missing on one of them may be there on the others."""
    if world.local_rank == 0:
        host = f"{socket.gethostname()}: " if world.rank != 0 else ""
        print(f"ds-pretrain: error: {host}{error}", file=sys.stderr, flush=True)


def running_environment() -> World:
    """`world_from_environment` of this process, exported for torch and DeepSpeed."""
    world = world_from_environment(os.environ)
    export_world(world, os.environ)
    return world
