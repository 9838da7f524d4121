"""DeepSpeed: with torch_autocast in fp16, ZeRO reports and clips by the norm of the scaled gradients.

The loss scaler multiplies the loss by 2^16, and runtime/zero/stage_1_and_2.py does not divide the norm by it.

python e_autocast_norm.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
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
module, inputs = torch.nn.Linear(16, 1, bias=False), 0.01 * torch.randn(2, 16)
(true_grad,) = torch.autograd.grad(module(inputs).square().mean(), module.weight)
config: dict[str, Any] = {
    "train_batch_size": 2, "gradient_clipping": 1.0, "torch_autocast": {"enabled": True, "dtype": "float16"},
    "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)
engine.backward(engine(inputs).float().square().mean())
engine.step()
reported, true = float(engine.get_global_grad_norm()), float(true_grad.norm())
print(f"gradient norm: expected {true:.5f}, found {reported:.5f}")
sys.exit(0 if abs(reported / true - 1) < 0.05 else 1)
