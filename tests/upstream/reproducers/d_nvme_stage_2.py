"""DeepSpeed: ZeRO-1 and ZeRO-2 silently replace an offload of the optimizer to NVMe by an offload to the CPU.

Neither runtime/zero/config.py nor runtime/zero/stage_1_and_2.py rejects "device": "nvme". Expected: an error, or
optimizer states on NVMe.

python d_nvme_stage_2.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import pathlib
import sys
import tempfile
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch

with tempfile.TemporaryDirectory() as folder:
    config: dict[str, Any] = {
        "train_batch_size": 2, "bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}}
    module = torch.nn.Linear(512, 512)
    try:
        engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.Adam(module.parameters()), config=config)
    except (ValueError, NotImplementedError) as error:
        print(f"expected an error, found {error}")
        sys.exit(0)
    engine.backward(engine(torch.ones(2, 512).bfloat16()).float().square().mean())
    engine.step()
    files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
states = sum(value.nbytes for state in engine.optimizer.optimizer.state.values() for value in state.values())
print(f"optimizer states: expected in files on NVMe, found {len(files)} files and {states} bytes in memory")
sys.exit(0 if files else 1)
