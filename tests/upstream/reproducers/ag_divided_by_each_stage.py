"""DeepSpeed: with a pipeline, gradients are divided by the number of micro-batches several times, or not at all.

`_backward_prologue_per_tensor` (runtime/engine.py) divides the gradient of the output of every stage, so that the
gradients of the first of two stages are divided twice. 0.19.4 divides that of the last stage only, and therefore not
the gradients of weights that the loss function uses. Here all gradients are 1 in each of two micro-batches.

python ag_divided_by_each_stage.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import socket
import sys

os.environ.update(DS_ACCELERATOR="cpu", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec, PipelineModule


class Bias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        outputs = inputs + self.bias
        return outputs if labels is None else outputs.mean()


def run_rank(rank: int, gradients: torch.Tensor) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.init_distributed()
    module = PipelineModule([LayerSpec(Bias), LayerSpec(Bias)], num_stages=2, loss_fn=Bias(),
                            partition_method="uniform")
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.train_batch(iter(lambda: (torch.ones(1, 1), torch.zeros(1, 1)), None))
    of_loss, of_layer = module.parameters()
    gradients[rank] = -of_layer.item()  # a weight changes by its gradient
    if rank:
        gradients[2] = -of_loss.item()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(found.getsockname()[1])
    gradients = torch.zeros(3).share_memory_()
    mp.start_processes(run_rank, (gradients,), nprocs=2, start_method="fork")
    print(f"gradients of stages 0 and 1 and of the loss: expected [1, 1, 1], found {gradients.tolist()}")
    sys.exit(0 if torch.allclose(gradients, torch.ones(3)) else 1)
