"""DeepSpeed: fp16 halves the gradients in each step after which the loss scale grows.

`step` increases the loss scale before it divides the gradients by it (runtime/zero/stage_1_and_2.py,
runtime/zero/stage3.py, runtime/fp16/). Here the scale grows after the second step.

python p_growing_scale.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on CPUs without AVX512_FP16, but it works
config: dict[str, Any] = {
    "train_batch_size": 1, "gradient_clipping": 0.0,
    "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
    "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
module = torch.nn.Linear(4, 1, bias=False)
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), config=config)
updates, scales = [], []
for _ in range(5):
    before = module.weight.detach().float().clone()
    engine.backward(engine(torch.ones(1, 4).half()).float().sum())  # the gradient is 1 for each weight
    engine.step()
    updates.append(round(float((before - module.weight.detach().float()).mean()), 2))
    scales.append(engine.optimizer.cur_scale)
print(f"updates at loss scales {scales}: expected 1 in each step, found {updates}")
sys.exit(0 if all(abs(update - 1) < 0.05 for update in updates) else 1)
