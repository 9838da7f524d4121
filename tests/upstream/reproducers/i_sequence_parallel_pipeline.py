"""DeepSpeed: "sequence_parallel_size" is ignored under a pipeline (runtime/pipe/engine.py, runtime/engine.py).

Expected: two ranks that share sequences, so that one data-parallel group trains; or an error.

python i_sequence_parallel_pipeline.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec, PipelineModule


def run_rank(rank: int, sizes: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    layers = [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(2)]
    module = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.MSELoss())
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "sequence_parallel_size": 2,
              "data_parallel_size": 1}
    engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters()), config=config)
    sizes.copy_(torch.tensor([engine.sequence_parallel_size, engine.dp_world_size]))


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    sizes = torch.zeros(2).share_memory_()
    mp.start_processes(run_rank, (sizes,), nprocs=2, start_method="fork")
    print(f"sequence- and data-parallel ranks: expected [2, 1], found {sizes.int().tolist()}")
    sys.exit(0 if sizes.tolist() == [2, 1] else 1)
