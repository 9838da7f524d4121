"""DeepSpeed: fp32 at ZeRO stage 0 clips by the gradient norm of the first pipeline stage alone.

`clip_grad_norm_` (runtime/utils.py) takes the parameters of all other stages for replicas, because
get_model_parallel_rank returns the pipeline stage. Here the gradients of both stages have the same norm n, so that the
clipped update of each stage must have the norm 1 / sqrt(2).

python k_clip_by_first_stage.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec, PipelineModule


def run_rank(rank: int, updates: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    layers = [LayerSpec(torch.nn.Linear, 8, 8, bias=False) for _ in range(2)]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(reduction="sum"), partition_method="uniform")
    for weight in module.parameters():
        torch.nn.init.eye_(weight)
    config = {"train_batch_size": 4, "gradient_clipping": 1.0}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.train_batch(iter(lambda: (torch.ones(4, 8), torch.zeros(4, 8)), None))
    updates[rank] = (next(module.parameters()).detach() - torch.eye(8)).norm()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    updates = torch.zeros(2).share_memory_()
    mp.start_processes(run_rank, (updates,), nprocs=2, start_method="fork")
    print(f"norm of the clipped gradients of all stages: expected 1, found {updates.norm():.4f}")
    sys.exit(0 if abs(updates.norm() - 1) < 1e-3 else 1)
