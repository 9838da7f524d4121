"""Work-arounds for the process groups of DeepSpeed: time-outs, and shared memory on CPUs."""

import importlib
import os
from datetime import timedelta
from pathlib import Path

from deepspeed import comm as dist
from torch.distributed import distributed_c10d


def use_one_timeout_for_all_groups(timeout: timedelta) -> None:
    """Give every process group the same time-out. Call it before the first group.

    DeepSpeed 0.19.8 (comm/torch.py, new_group) creates all groups after the first with torch's default, 30 minutes for
    gloo. Guarded by tests/cluster/test_multihost_launch.py, test_a_cut_network_ends_all_ranks.
    """
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
    dist.barrier()  # every rank has opened the segments of all ranks
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    segment = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
    segment.unlink(missing_ok=True)
