"""DeepSpeed: `zero.Init(dtype=...)` makes bf16 parameters, whatever the dtype, on a device without fp16.

`_set_dtype` (runtime/zero/partition_parameters.py) reads `dtype or torch.float16 if is_fp16_supported() else
torch.bfloat16`. Python evaluates this as `(dtype or torch.float16) if ... else torch.bfloat16`.

python s_zero_init_dtype.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

type(get_accelerator()).is_fp16_supported = lambda self: False  # as on a CPU without AVX512_FP16
config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
    found = torch.nn.Linear(8, 8).weight.ds_tensor.dtype  # type: ignore[attr-defined]
print(f"dtype of partitions: expected torch.float32, found {found}")
sys.exit(0 if found == torch.float32 else 1)
