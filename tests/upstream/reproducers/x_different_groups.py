"""DeepSpeed: pipeline stages with different numbers of parameter groups wait for each other forever under ZeRO-1.

`scaled_global_norm` (runtime/zero/stage_1_and_2.py) reduces the norm of each non-empty group over the stages.

python x_different_groups.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import signal
import socket
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec, PipelineModule

LIMIT_S = 10  # the step takes a fraction of a second


def run_rank(rank: int, done: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    layers = [LayerSpec(torch.nn.Linear, 8, 8, bias=False) for _ in range(3)]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    groups = [{"params": [parameter]} for parameter in module.parameters()]  # two groups, or one
    config: dict[str, Any] = {"train_batch_size": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
                              "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(groups, lr=0.1), config=config)
    signal.alarm(LIMIT_S)  # ends this process
    engine.train_batch(iter(lambda: (torch.ones(4, 8).bfloat16(), torch.zeros(4, 8).bfloat16()), None))
    done[rank] = 1


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    done = torch.zeros(2).share_memory_()
    ranks = mp.start_processes(run_rank, (done,), nprocs=2, start_method="fork", join=False)
    for process in ranks.processes:
        process.join()
    print(f"ranks that end their first step: expected 2, found {int(done.sum())}")
    sys.exit(0 if done.sum() == 2 else 1)
