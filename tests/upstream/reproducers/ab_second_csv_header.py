"""DeepSpeed: CSV files of a resumed run get a second header.

`write_events` (monitor/csv_monitor.py) writes the header whenever its own object has not yet written to a file. Here a
second engine stands for the resumed run.

python ab_second_csv_header.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
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
    config: dict[str, Any] = {"train_batch_size": 2,
                              "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    for _ in range(2):
        module = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    path = next(pathlib.Path(folder).rglob("*lr.csv"))
    headers = [line for line in path.read_text().splitlines() if "lr" in line]
print(f"headers in the CSV file of two runs: expected 1, found {len(headers)}")
sys.exit(0 if len(headers) == 1 else 1)
