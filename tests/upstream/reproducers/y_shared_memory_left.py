"""DeepSpeed: on CPUs, each run leaves a segment of 66 MiB for each rank in /dev/shm.

csrc/cpu/comm/shm.cpp (shm_initialize) opens the segments by name, and nothing unlinks them.

python y_shared_memory_left.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import pathlib
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch.multiprocessing as mp


def run_rank(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    mp.start_processes(run_rank, nprocs=2, start_method="fork")
    left = list(pathlib.Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_*"))
    size = sum(path.stat().st_size for path in left)
    for path in left:
        path.unlink()
    print(f"files in /dev/shm after a run of 2 ranks: expected 0, found {len(left)} of {size >> 20} MiB together")
    sys.exit(1 if left else 0)
