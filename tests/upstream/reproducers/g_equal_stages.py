"""DeepSpeed: the layers of all pipeline stages start with the same weights, because all stages seed torch alike.

With layers 0 and 1 on stage 0 and layers 2 and 3 on stage 1, layer 2 equals layer 0 (runtime/pipe/module.py, _build).

python g_equal_stages.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec, PipelineModule


def run_rank(rank: int, weights: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [LayerSpec(torch.nn.Linear, 8, 8, bias=False) for _ in range(4)]
    module = PipelineModule(layers, num_stages=2, partition_method="uniform")
    weights[rank] = next(module.parameters()).detach()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    weights = torch.zeros(2, 8, 8).share_memory_()
    mp.start_processes(run_rank, (weights,), nprocs=2, start_method="fork")
    equal = torch.equal(weights[0], weights[1])
    print(f"the first layers of the two stages: expected different weights, found {'equal' if equal else 'different'}")
    sys.exit(1 if equal else 0)
