"""DeepSpeed: fp32 at ZeRO stage 0 applies updates with non-finite gradients (runtime/engine.py, _take_model_step).

All other precisions and stages skip such an update.

python m_fp32_nan.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import math
import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch

module = torch.nn.Linear(8, 8)
config = {"train_batch_size": 2, "gradient_clipping": 1.0}
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)
engine.backward(engine(torch.ones(2, 8)).square().mean() * math.nan)
engine.step()
bad = int((~module.weight.isfinite()).sum())
print(f"non-finite weights after an update with NaN gradients: expected 0, found {bad} of {module.weight.numel()}; "
      f"skipped updates: expected 1, found {engine.skipped_steps}")
sys.exit(0 if bad == 0 else 1)
