"""DeepSpeed: a skipped update changes Muon's momentum under ZeRO-3.

`step` (runtime/zero/stage3.py) updates the momentum before it checks the gradient norm.

python o_muon_momentum.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import math
import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0", TORCHDYNAMO_DISABLE="1")
import deepspeed
import torch

config: dict[str, Any] = {
    "train_batch_size": 2, "gradient_clipping": 1.0, "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
    "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_scatter": False, "sub_group_size": 64}}
matrix, bias = torch.nn.Linear(8, 8, bias=False), torch.nn.Parameter(torch.zeros(8))
module = torch.nn.Module()
module.matrix, module.bias = matrix, bias  # Muon updates the matrix, Adam the bias
module.forward = lambda x, factor: matrix(x).float().square().mean() + (bias * factor).float().sum()
for parameter, use_muon in ((matrix.weight, True), (bias, False)):
    parameter.use_muon = use_muon  # type: ignore[attr-defined]
engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
if not getattr(engine.optimizer, "use_muon", False):
    print("cannot run: this version has no Muon under ZeRO-3")
    sys.exit(77)
momentum = []
for factor in (1.0, math.nan):  # the second step has NaN in the gradient of the bias alone
    engine.backward(engine(torch.ones(2, 8).bfloat16(), torch.tensor(factor).bfloat16()))
    engine.step()
    momentum.append(next(state["momentum_buffer"].clone() for state in engine.optimizer.optimizer.state.values()
                         if "momentum_buffer" in state))
changed = not torch.equal(*momentum)
print(f"momentum after a skipped update: expected unchanged, found {'changed' if changed else 'unchanged'}; "
      f"skipped updates: {engine.skipped_steps}")
sys.exit(1 if changed else 0)
