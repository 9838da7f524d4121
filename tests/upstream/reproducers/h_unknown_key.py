"""DeepSpeed: unknown top-level keys of the JSON are ignored (runtime/config.py).

A misspelt "zero_optimization" trains without ZeRO. Expected: an error.

python h_unknown_key.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig

deepspeed.init_distributed()
try:
    config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimisation": {"stage": 2}})
except Exception as error:
    print(f"expected an error, found {error}")
    sys.exit(0)
print(f'"zero_optimisation" (misspelt) with stage 2: expected an error, found stage {config.zero_optimization_stage}')
sys.exit(1)
