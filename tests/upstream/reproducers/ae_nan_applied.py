"""DeepSpeed: with ZeRO in bf16 or fp32, an update with NaN gradients is applied, or ends the run.

The optimizers (runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py) looked for overflows in fp16 only, or in bf16 if
"check_grad_overflow" was set. BF16_Optimizer (runtime/bf16_optimizer.py) failed at an assertion. Expected: a skipped
update, as in fp16.

python ae_nan_applied.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import math
import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch


def is_wrong(stage: int, precision: str, accumulation: str) -> bool:
    module = torch.nn.Linear(8, 8)
    config: dict[str, Any] = {"train_batch_size": 2, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
                              "zero_optimization": {"stage": stage}, "bf16": {"enabled": precision == "bf16"},
                              "data_types": {"grad_accum_dtype": accumulation}}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    inputs = torch.ones(2, 8, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    engine.backward(engine(inputs).float().square().mean() * math.nan)
    try:
        engine.step()
    except AssertionError:
        return True
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return not bool(module.weight.isfinite().all())


cases = [(stage, dtype, dtype) for dtype in ("fp32", "bf16") for stage in (1, 2, 3)] + [(1, "bf16", "fp32")]
wrong = ["ZeRO-{} {} + {}".format(*case) for case in cases if is_wrong(*case)]
print(f"settings that apply an update with NaN, or fail: expected none, found {wrong or 'none'}")
sys.exit(1 if wrong else 0)
