"""DeepSpeed: fp16 at ZeRO stage 0 never scales the loss, but divides the gradients by the loss scale.

`DeepSpeedEngine.backward` (runtime/engine.py) scales the loss only for a ZeROOptimizer. `step` of the fp16 optimizers
(runtime/fp16/) divides by the scale in any case: each update is too small by this factor.

python a_fp16_stage_0.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0")
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on CPUs without AVX512_FP16, but it works
torch.manual_seed(0)
module = torch.nn.Linear(16, 1, bias=False)
before = module.weight.detach().clone()
inputs = torch.randn(4, 16)
(true_grad,) = torch.autograd.grad(module(inputs).square().mean(), module.weight)
config = {"train_batch_size": 4, "gradient_clipping": 0.0, "fp16": {"enabled": True, "initial_scale_power": 8}}
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), config=config)
engine.backward(engine(inputs.half()).float().square().mean())
engine.step()
ratio = float((before - module.weight.detach().float()).norm() / true_grad.norm())
print(f"update divided by the true gradient: expected 1, found {ratio:.4f}")
sys.exit(0 if 0.9 < ratio < 1.1 else 1)
