"""Form the process group of a run, with the time-out and the network interface that it needs."""

import os
from collections.abc import MutableMapping

from pretrain.distributed.host import interface_towards
from pretrain.distributed.world import World
from pretrain.errors import ConfigError

_FAR_ADDRESS = "203.0.113.1"  # of a network for examples; only the route to it is asked for


def choose_interface(world: World, environ: MutableMapping[str, str]) -> None:
    """Between hosts gloo binds to the address of this host's name, often 127.0.0.1, unless an interface is named."""
    on_one_host = int(environ["LOCAL_SIZE"]) >= world.size or environ["MASTER_ADDR"] in ("127.0.0.1", "localhost")
    if on_one_host or "GLOO_SOCKET_IFNAME" in environ:
        return
    found = interface_towards(environ["MASTER_ADDR"]) or interface_towards(_FAR_ADDRESS)
    if found is not None:
        environ["GLOO_SOCKET_IFNAME"] = found[0]


def taken_port(world: World) -> ConfigError:
    """Error for a MASTER_PORT that another program listens on, with the remedy of the launcher in use."""
    remedy = "MASTER_PORT=N before its command"
    if world.launcher == "none":
        remedy = "unset MASTER_PORT: one process takes a free port by itself"
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        remedy = "torchrun --master_port N"
    elif "CROSS_RANK" in os.environ:  # of deepspeed/launcher/launch.py
        remedy = "deepspeed --master_port N, or ds-pretrain, which chooses a free one"
    elif world.launcher in ("openmpi", "pmi", "mpi"):
        remedy = "MASTER_PORT=N before mpirun (Open MPI: mpirun -x MASTER_PORT=N)"
    elif world.launcher == "slurm":
        remedy = "MASTER_PORT=N before srun"
    return ConfigError("MASTER_PORT", found=f"{os.environ['MASTER_PORT']}, which another program listens on",
                       expected="a free port on rank 0's host", remedy=remedy)


def init_process_group(world: World) -> None:
    """Form the process group; every rank checks that it has the size that the launcher promised."""
    import deepspeed
    import torch.distributed
    from deepspeed.accelerator import get_accelerator

    from pretrain.patches import process_group as patches

    if world.size == 1:
        patches.skip_shared_memory_operator()
    choose_interface(world, os.environ)
    patches.use_one_timeout_for_all_groups()
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise taken_port(world) from None
    if get_accelerator().device_name() == "cpu":
        patches.remove_shared_memory_names(world.rank)
    else:
        get_accelerator().set_device(world.local_rank)
    formed = torch.distributed.get_world_size()
    if formed != world.size:
        raise ConfigError("world size", found=formed, expected=f"{world.size}, as {world.launcher} says")
