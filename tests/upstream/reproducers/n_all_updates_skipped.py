"""DeepSpeed: after one skipped update, all later updates are skipped.

With ZeRO-1 or ZeRO-2, an offloaded optimizer and fp32 accumulation, `step` (runtime/zero/stage_1_and_2.py) keeps the
buffer `averaged_gradients` when it skips an update, and the next step adds its gradients to the NaN.

python n_all_updates_skipped.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import math
import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch

config: dict[str, Any] = {
    "train_batch_size": 2, "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"}, "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
module = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)
skipped = []
for factor in (1.0, math.nan, 1.0, 1.0):
    engine.backward(engine(torch.ones(2, 8).bfloat16()).float().square().mean() * factor)
    engine.step()
    skipped.append(engine.skipped_steps)
if skipped[-1] == 0:
    print("cannot run: this version does not skip the update with NaN, so that the defect cannot show")
    sys.exit(77)
print(f"skipped updates after each step, of which the second has NaN: expected [0, 1, 1, 1], found {skipped}")
sys.exit(1 if skipped[-1] > skipped[1] else 0)
