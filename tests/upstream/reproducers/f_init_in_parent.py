"""DeepSpeed: `nn.init` in a parent's `__init__` has no effect on a child's weight under `zero.Init`.

The child's weight is partitioned, and empty, as soon as the child's own `__init__` returns
(runtime/zero/partition_parameters.py). Expected: the weight has the value, or an error.

python f_init_in_parent.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch


class Parent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = torch.nn.Linear(8, 8)
        torch.nn.init.constant_(self.child.weight, 3.0)


with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 3}}):
    module = Parent()
with deepspeed.zero.GatheredParameters([module.child.weight]):
    found = float(module.child.weight.mean())
print(f"mean of the weight: expected 3, found {found:.4f}")
sys.exit(0 if found == 3 else 1)
