"""DeepSpeed: with "zero_hpz_partition_size", the second engine of a process fails at an assertion.

`_create_zero_param_parallel_group` (utils/groups.py) asserts that the group of an earlier engine does not exist.

python ac_second_hpz_engine.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp

CONFIG: dict[str, Any] = {"train_batch_size": 2, "zero_allow_untested_optimizer": True,
                          "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}


def run_rank(rank: int, engines: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for _ in range(2):
        try:
            with deepspeed.zero.Init(config_dict_or_path=CONFIG):
                module = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)
        except AssertionError:
            return
        engines[rank] += 1


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    engines = torch.zeros(2).share_memory_()
    mp.start_processes(run_rank, (engines,), nprocs=2, start_method="fork")
    print(f"engines that the two ranks make: expected [2, 2], found {engines.int().tolist()}")
    sys.exit(0 if engines.tolist() == [2, 2] else 1)
