"""DeepSpeed: process groups after the first one ignore DEEPSPEED_TIMEOUT and the argument `timeout`.

`new_group` (comm/torch.py) creates them with torch's default, 30 minutes for gloo.

python z_group_timeout.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import datetime
import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch
import torch.distributed as dist

deepspeed.init_distributed(timeout=datetime.timedelta(minutes=3))
groups = [dist.group.WORLD, deepspeed.comm.new_group([0])]
minutes = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60 for group in groups]
print(f"time-outs of the first and of another group in minutes: expected [3.0, 3.0], found {minutes}")
sys.exit(0 if minutes == [3, 3] else 1)
