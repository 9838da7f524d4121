"""DeepSpeed: ZeRO-3 divides gradients by the ranks that share a sequence.

`__avg_scatter_grads` (runtime/zero/stage3.py) averages over all ranks. ZeRO-1, ZeRO-2, and ZeRO-3 with
"reduce_scatter": false sum over the ranks that share a sequence, as the sum over its tokens demands. Here both ranks
share all sequences and have the same gradient: the sum is twice as large.

python r_sequence_parallel_zero_3.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.runtime.sequence_parallel import parallel_state_sp

CONFIG: dict[str, Any] = {"train_batch_size": 2, "gradient_clipping": 1.0, "sequence_parallel_size": 2,
                          "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}


def run_rank(rank: int, norms: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8, bias=False)
    (own_grad,) = torch.autograd.grad(module(torch.ones(2, 8)).square().mean(), module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG, mpu=parallel_state_sp)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    norms[0], norms[1] = 2 * own_grad.norm(), float(engine.get_global_grad_norm())


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    norms = torch.zeros(2).share_memory_()
    mp.start_processes(run_rank, (norms,), nprocs=2, start_method="fork")
    print(f"gradient norm at ZeRO stage 3: expected {norms[0]:.4f}, found {norms[1]:.4f}")
    sys.exit(0 if abs(norms[1] / norms[0] - 1) < 1e-3 else 1)
