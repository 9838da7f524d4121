"""DeepSpeed: with Muon, gradient clipping divides every update by the norm of the orthogonalized matrices.

runtime/zero/stage_1_and_2.py (get_flat_partition) and runtime/zero/stage3.py (step) replace the gradients of matrices
by orthogonalized updates before the norm is computed. This norm is about 8 for a 64 x 64 matrix, however small the
gradients are. Here they are far below the clipping threshold: the clipped and the unclipped update must be equal.

python q_muon_clipping.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="0", TORCHDYNAMO_DISABLE="1")
import deepspeed
import torch


def size_of_update(clipping: float) -> float:
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64, bias=False)
    module.weight.use_muon = True  # type: ignore[attr-defined]
    config: dict[str, Any] = {
        "train_batch_size": 64, "gradient_clipping": clipping,
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Muon", "params": {"lr": 0.1, "weight_decay": 0.0}}}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    before = module.weight.detach().clone()
    engine.backward(engine(torch.randn(64, 64)).square().mean() * 1e-3)
    engine.step()
    return float((module.weight.detach() - before).norm())


clipped, unclipped = size_of_update(1.0), size_of_update(0.0)
print(f"norm of the update with clipping: expected {unclipped:.4f}, found {clipped:.4f}")
sys.exit(0 if abs(clipped / unclipped - 1) < 0.1 else 1)
