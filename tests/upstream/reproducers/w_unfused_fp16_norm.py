"""DeepSpeed: FP16_UnfusedOptimizer counts tied gradients once per pipeline stage.

`step` (runtime/fp16/unfused_optimizer.py) looks for the attribute ds_pipe_replicated on the gradients, and it is on the
parameters. Here the two stages share the only weight, with equal gradients: the norm must be that of one copy.

python w_unfused_fp16_norm.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec


def run_rank(rank: int, norms: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on CPUs without AVX512_FP16, but it works
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [TiedLayerSpec("tied", torch.nn.Linear, 8, 8, bias=False) for _ in range(2)]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    config: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 1.0,
                              "fp16": {"enabled": True, "loss_scale": 1}}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    x = torch.ones(4, 8).half()
    engine.train_batch(iter(lambda: (x, torch.zeros_like(x)), None))
    norms[rank] = float(engine.optimizer._global_grad_norm)


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    torch.manual_seed(0)
    weight = torch.nn.Linear(8, 8, bias=False).weight
    loss = (torch.ones(4, 8) @ weight.T @ weight.T).square().mean()
    true_norm = float(torch.autograd.grad(loss, weight)[0].norm())
    norms = torch.zeros(2).share_memory_()
    mp.start_processes(run_rank, (norms,), nprocs=2, start_method="fork")
    print(f"gradient norm: expected {true_norm:.4f}, found {norms[0]:.4f}")
    sys.exit(0 if abs(norms[0] / true_norm - 1) < 0.02 else 1)
