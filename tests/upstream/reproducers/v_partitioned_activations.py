"""DeepSpeed: pipeline stages with tensor parallelism send a part of each tensor, as if all ranks of a tensor-parallel
group had the same one.

By default `PipelineEngine` (runtime/pipe/engine.py, is_pipe_partitioned) sends only 1 / (tensor-parallel ranks) of an
activation, and the next stage gathers the parts of different tensors. Here two ranks of a group send 0 and 1.
Expected: each rank of the next stage receives what its peer sent.

python v_partitioned_activations.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology


class AddRank(torch.nn.Module):
    """The first stage adds the number of its tensor-parallel rank; the second one records what it received."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.weight, self.received = first, torch.nn.Parameter(torch.ones(1)), torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.received = x.detach().clone()
        return self.weight * x + int(os.environ["RANK"]) % 2 if self.first else self.weight * x


def run_rank(rank: int, received: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    module = PipelineModule([AddRank(True), AddRank(False)], loss_fn=torch.nn.MSELoss(), partition_method="uniform",
                            topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config={"train_batch_size": 1})
    engine.train_batch(iter(lambda: (torch.zeros(1, 4), torch.zeros(1, 4)), None))
    received[rank] = next(layer for layer in module.modules() if isinstance(layer, AddRank)).received


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    received = torch.zeros(4, 1, 4).share_memory_()
    mp.start_processes(run_rank, (received,), nprocs=4, start_method="fork")
    rows = received[2:, 0].tolist()
    print(f"tensors that the ranks of stage 1 receive: expected {[[0.0] * 4, [1.0] * 4]}, found {rows}")
    sys.exit(0 if rows == [[0.0] * 4, [1.0] * 4] else 1)
