"""DeepSpeed: gradients of tied weights are not summed over pipeline stages, if they accumulate in another dtype.

`PipelineEngine._exec_reduce_tied_grads` (runtime/pipe/engine.py) sums `weight.grad`, but ZeRO-1 keeps the gradient
elsewhere if its dtype differs from the model's (runtime/zero/stage_1_and_2.py, get_gradient_for_reduction). The copies
of the weight on the two stages then differ more with each step.

python b_tied_gradients.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import PipelineModule, TiedLayerSpec

CONFIG = {"train_batch_size": 4, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
          "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
          "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def run_rank(rank: int, weights: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [TiedLayerSpec("tied", torch.nn.Linear, 8, 8, bias=False) for _ in range(2)]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)
    batches = iter(lambda: (torch.ones(4, 8).bfloat16(), torch.zeros(4, 8).bfloat16()), None)
    for _ in range(4):
        engine.train_batch(batches)
    weights[rank] = module.tied_modules["tied"].weight.detach().float()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    weights = torch.zeros(2, 8, 8).share_memory_()
    mp.start_processes(run_rank, (weights,), nprocs=2, start_method="fork")
    difference = float((weights[0] - weights[1]).abs().max())
    print(f"difference of the tied weight between the stages: expected 0, found {difference:.4f}")
    sys.exit(0 if difference == 0 else 1)
