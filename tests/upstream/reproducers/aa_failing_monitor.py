"""DeepSpeed: a failing monitor ends the run.

`MonitorMaster` (monitor/monitor.py) lets the exceptions of a monitor, such as those of a full disk or of a lost
connection, reach the training step of rank 0. Expected: a warning. Here the folder of the CSV files disappears.

python aa_failing_monitor.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import shutil
import sys
import tempfile
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch

folder = tempfile.mkdtemp()
config: dict[str, Any] = {"train_batch_size": 2,
                          "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
module = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)
shutil.rmtree(folder)
try:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
except OSError as error:
    print(f"step: expected success, found {type(error).__name__}: {error}")
    sys.exit(1)
print("step: expected success, found success")
