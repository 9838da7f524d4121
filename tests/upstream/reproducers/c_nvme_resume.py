"""DeepSpeed: a resume restores nothing if the optimizer is on NVMe.

`load_checkpoint` (runtime/engine.py) skips the optimizer file. Sub-groups under 1 MiB, which are not swapped, are never
restored, weights included.

python c_nvme_resume.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys
import tempfile
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

if not AsyncIOBuilder().is_compatible():
    print("cannot run: the operator async_io needs libaio")
    sys.exit(77)
INPUTS = torch.ones(4, 64).bfloat16()


def train(folder: str, *, resume: bool) -> float:
    """Take a step, save or load, take two more steps; return the last loss."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_batch_size": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/swap"}}}
    module = torch.nn.Linear(64, 64)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    for step in range(3):
        if step == 1 and resume:
            engine.load_checkpoint(folder)
        loss = engine(INPUTS if step or not resume else -INPUTS).float().square().mean()
        engine.backward(loss)
        engine.step()
        if step == 0 and not resume:
            engine.save_checkpoint(folder)
    return float(loss)


with tempfile.TemporaryDirectory() as folder:
    uninterrupted, resumed = train(folder, resume=False), train(folder, resume=True)
print(f"last loss after a resume: expected {uninterrupted:.6f}, found {resumed:.6f}")
sys.exit(0 if abs(uninterrupted - resumed) < 1e-4 else 1)
