"""DeepSpeed: the fp16 optimizers of ZeRO stage 0 take a step with zero gradients at construction.

`initialize_optimizer_states` (runtime/fp16/fused_optimizer.py, runtime/fp16/unfused_optimizer.py) calls the optimizer.
This decays the weights in fp32, and counts as Adam's first step.

python af_step_at_construction.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
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
module = torch.nn.Linear(16, 1, bias=False)
initial = module.weight.detach().clone()
config: dict[str, Any] = {"train_batch_size": 4, "fp16": {"enabled": True}}
optimizer = torch.optim.SGD(module.parameters(), lr=1.0, weight_decay=0.5)
engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
(master,) = engine.optimizer.fp32_groups[0]  # the weights in fp32
ratio = float(master.detach().norm() / initial.norm())
print(f"weights before the first step divided by the initial ones: expected 1, found {ratio:.4f}")
sys.exit(0 if abs(ratio - 1) < 0.01 else 1)
