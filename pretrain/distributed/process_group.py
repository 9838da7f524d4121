"""Form the process group of a run, with the right time-out and network interface."""

import contextlib
import errno
import importlib
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

from pretrain.distributed.equal_ranks import Facts, check_equal_ranks, is_refused
from pretrain.distributed.host import interface_towards
from pretrain.distributed.own_gpu import open_gpu, require_computing
from pretrain.distributed.requirements import shortcut
from pretrain.distributed.tcp_store import start_store
from pretrain.distributed.world import World
from pretrain.errors import REJECTED, ConfigError

_FAR_ADDRESS = "203.0.113.1"  # reserved for documentation (RFC 5737); used only to find the route
_DEFAULT_TIMEOUT_S = 1800.0
_AFTER_WATCHDOG_S = 300.0
_MOST_MINUTES = 10**6
_left: list[object] = []  # see leave_process_group
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOOPBACK_INTERFACE = "lo"


def all_ranks_here(world: World, environ: Mapping[str, str]) -> bool:
    """Return whether all ranks of the run are on this host."""
    return int(environ["LOCAL_SIZE"]) >= world.size or environ["MASTER_ADDR"] in _LOOPBACK


def choose_interface(world: World, environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME: the network interface on which gloo listens and connects.

    Without this variable gloo uses the address of the host's name. For several hosts this is often the wrong one,
    127.0.0.1. For ranks on one host it is often an address that other hosts can connect to.
    """
    if "GLOO_SOCKET_IFNAME" in environ:
        return
    if all_ranks_here(world, environ):
        if environ["MASTER_ADDR"] in _LOOPBACK and _LOOPBACK_INTERFACE in _interfaces():
            environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK_INTERFACE
        return
    found = interface_towards(environ["MASTER_ADDR"]) or interface_towards(_FAR_ADDRESS)
    if found is not None:
        environ["GLOO_SOCKET_IFNAME"] = found[0]


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@contextlib.contextmanager
def _store_of_this_host(world: World) -> Iterator[None]:
    """Run the process group's store on rank 0 while the group forms. torch's own would listen on all addresses.

    With several hosts, or under torchrun, which runs the store, this does nothing.
    """
    store = None
    if (world.rank == 0 and all_ranks_here(world, os.environ)
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"):
        try:
            store = start_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), on_one_host=True,
                                timeout_s=_DEFAULT_TIMEOUT_S)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise taken_port(world) from None
    yield
    del store  # the process group holds the server from now on


def taken_port(world: World) -> ConfigError:
    """Return the error for a MASTER_PORT on which another program listens, with the remedy for the launcher in use."""
    remedy = "set MASTER_PORT=N before the launcher's command"
    if world.launcher == "none":
        remedy = "unset MASTER_PORT: a single process chooses a free port by itself"
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        remedy = "choose another port with torchrun --master_port N"
    elif "CROSS_RANK" in os.environ:  # set by deepspeed/launcher/launch.py
        remedy = "choose another port with deepspeed --master_port N, or use ds-pretrain, which finds a free one"
    elif world.launcher in ("openmpi", "pmi", "mpi"):
        remedy = "set MASTER_PORT=N before mpirun (Open MPI: mpirun -x MASTER_PORT=N)"
    elif world.launcher == "slurm":
        remedy = "set MASTER_PORT=N before srun"
    port = os.environ["MASTER_PORT"]
    return ConfigError("MASTER_PORT", problem=f"another program listens on port {port} of rank 0's host", remedy=remedy)


def collective_timeout_s(longest_s: float, environ: MutableMapping[str, str]) -> float:
    """Return the time-out of collectives in seconds. NCCL's heartbeat monitor gets at least the same.

    DEEPSPEED_TIMEOUT (minutes) sets it. Without this variable it is longer than `longest_s`, the longest time-out of
    the watchdog, which names the rank that did not arrive; a collective that times out does not.
    """
    seconds = max(_DEFAULT_TIMEOUT_S, longest_s + _AFTER_WATCHDOG_S)
    if "DEEPSPEED_TIMEOUT" in environ:
        text = environ["DEEPSPEED_TIMEOUT"]
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= _MOST_MINUTES:
            raise ConfigError("DEEPSPEED_TIMEOUT", found=repr(text),
                              expected=f"a whole number of minutes from 1 to {_MOST_MINUTES}")
        seconds = 60.0 * int(text)
    environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(seconds)))
    return seconds


def init_process_group(world: World, longest_s: float = 0.0, facts: Facts | None = None) -> None:
    """Form the process group. Each rank checks that it has the world size that the launcher announced.

    Raises SystemExit if rank 0 has rejected the run, ConfigError on every rank if their facts differ, and DeviceError
    on a rank whose GPU does not compute.

    Args:
        longest_s: see `collective_timeout_s`.
        facts: what all ranks must have in common; None: it is not compared.
    """
    import deepspeed
    import torch.distributed
    from deepspeed.accelerator import get_accelerator

    if world.size == 1:
        with shortcut("no operator for collectives on one rank"):
            skip_shared_memory_operator()
    choose_interface(world, os.environ)
    on_cpu = get_accelerator().device_name() == "cpu"
    if not on_cpu:  # before the process group: NCCL's communicators belong to the current device
        open_gpu(world)
        require_computing(world.local_rank)
    timeout = timedelta(seconds=collective_timeout_s(longest_s, os.environ))
    if is_refused(world, timeout.total_seconds()):
        raise SystemExit(REJECTED)  # silently: rank 0 has printed why
    if world.rank == 0 and timeout.total_seconds() < longest_s:
        print(f"note: DEEPSPEED_TIMEOUT ({timeout.total_seconds() / 60:g} minutes) is shorter than a time-out of the "
              f"watchdog ({longest_s / 60:g} minutes): a hang may end with an error that names no rank",
              flush=True)
    use_one_timeout_for_all_groups(timeout)
    try:
        with _store_of_this_host(world):
            store = None if facts is None or world.size == 1 else check_equal_ranks(
                world, facts, on_one_host=all_ranks_here(world, os.environ), timeout_s=timeout.total_seconds())
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
            del store  # the process group holds the server from now on
    except (OSError, torch.distributed.DistNetworkError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
            raise
        raise taken_port(world) from None
    if on_cpu:
        remove_shared_memory_names(world.rank)
    formed = torch.distributed.get_world_size()
    if formed != world.size:
        raise ConfigError("world size", found=formed,
                          expected=f"{world.size}, according to the variables of {world.launcher}")


def leave_process_group() -> None:
    """Leave all process groups at the end of the process. The objects of the groups remain until it has ended.

    Their destructors wait for gloo's threads with the interpreter's lock, and such a thread needs the lock to free the
    tensors of the last collective: with torch 2.6 the process hung now and then (ProcessGroupGloo.cpp). Guarded by
    `tests/versions.sh lowest`.
    """
    from torch.distributed import distributed_c10d

    _left.extend(distributed_c10d._world.pg_map)
    distributed_c10d.destroy_process_group()


def use_one_timeout_for_all_groups(timeout: timedelta) -> None:
    """Give every process group the same time-out. Call it before the first group.

    DeepSpeed 0.19.8 (comm/torch.py, new_group) creates all groups after the first with torch's default, 30 minutes for
    gloo. Guarded by tests/cluster/test_multihost_launch.py, test_a_cut_network_ends_all_ranks.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout


def skip_shared_memory_operator() -> None:
    """Keep DeepSpeed from compiling its operator for collectives in shared memory. Call it before the first group.

    DeepSpeed 0.19.8 (comm/torch.py, TorchBackend.__init__) compiles the operator even for one rank, which needs none.
    Guarded by tests/distributed/test_upstream_ranks.py, test_one_rank_loads_no_shared_memory_operator.
    """
    comm_torch = importlib.import_module("deepspeed.comm.torch")  # `from deepspeed.comm import torch` is PyTorch
    setattr(comm_torch, "build_shm_op", lambda: None)  # noqa: B010 (mypy rejects an assignment)


def remove_shared_memory_names(rank: int) -> None:
    """Unlink this rank's shared-memory segment. Collective. The mapping remains valid without the name.

    DeepSpeed 0.19.8 (csrc/cpu/comm/shm.cpp, shm_initialize) opens a segment of 66 MiB for each rank by name and never
    unlinks it: every run leaves its segments in /dev/shm. After this call nothing remains, even if the run is killed.
    Guarded by tests/distributed/test_upstream_ranks.py, test_no_shared_memory_is_left_behind.
    """
    from deepspeed import comm as dist

    dist.barrier()  # every rank has opened the segments of all ranks
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    segment = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    segment.unlink(missing_ok=True)
