"""DeepSpeed: fp16 at ZeRO stage 0 never scales the loss, but divides the gradients by the loss scale.

`DeepSpeedEngine.backward` (runtime/engine.py) scales the loss only for a ZeROOptimizer. `step` of the fp16 optimizers
(runtime/fp16/) divides by the scale in any case: each update is too small by this factor.

python a_fp16_stage_0.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on CPUs without AVX512_FP16, but it works
torch.manual_seed(0)
module = torch.nn.Linear(16, 1, bias=False)
inputs = torch.randn(4, 16)
(true_grad,) = torch.autograd.grad(module(inputs).square().mean(), module.weight)
config: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 0.0,
                          "fp16": {"enabled": True, "initial_scale_power": 8}}
optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
(master,) = engine.optimizer.fp32_groups[0]  # the weights in fp32
before = master.detach().clone()
engine.backward(engine(inputs.half()).float().square().mean())
engine.step()
ratio = float((before - master.detach()).norm() / true_grad.norm())
print(f"update divided by the true gradient: expected 1, found {ratio:.4f}")
sys.exit(0 if abs(ratio - 1) < 0.1 else 1)
