"""DeepSpeed: in fp16, one overflow at the minimum loss scale ends the run with a bare Exception.

`DynamicLossScaler.update_scale` (runtime/fp16/loss_scaler.py) raises it. Expected: a skipped update, as in bf16.

python ad_minimum_loss_scale.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import math
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
    "train_batch_size": 2, "fp16": {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1},
    "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
module = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)
engine.backward(engine(torch.ones(2, 8).half()).float().square().mean() * math.nan)
try:
    engine.step()
except Exception as error:
    print(f"step: expected a skipped update, found {type(error).__name__}: {error}")
    sys.exit(1)
print(f"step: expected a skipped update, found {engine.skipped_steps}")
sys.exit(0 if engine.skipped_steps == 1 else 1)
