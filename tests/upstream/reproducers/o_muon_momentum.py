"""DeepSpeed: a skipped update changes Muon's momentum under ZeRO-3.

runtime/zero/stage3.py updates the momentum before it looks for NaN: in `step`, or while gradients are reduced.

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
from deepspeed.accelerator import get_accelerator

type(get_accelerator()).is_fp16_supported = lambda self: True  # slow on CPUs without AVX512_FP16, but it works


def is_wrong(precision: str, dtype: torch.dtype) -> bool:
    matrix, bias = torch.nn.Linear(8, 8, bias=False), torch.nn.Parameter(torch.zeros(8))
    module = torch.nn.Module()
    module.matrix, module.bias = matrix, bias  # Muon updates the matrix, Adam the bias
    module.forward = lambda x, factor: matrix(x).float().square().mean() + (bias * factor).float().sum()
    for parameter, use_muon in ((matrix.weight, True), (bias, False)):
        parameter.use_muon = use_muon  # type: ignore[attr-defined]
    config: dict[str, Any] = {
        "train_batch_size": 2, "gradient_clipping": 1.0, "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        precision: {"enabled": True, **({"initial_scale_power": 4} if precision == "fp16" else {})},
        "zero_optimization": {"stage": 3, "reduce_scatter": False, "sub_group_size": 64}}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    momentum = []
    for factor in (1.0, math.nan):  # the second step has NaN in the gradient of the bias alone
        engine.backward(engine(torch.ones(2, 8, dtype=dtype), torch.tensor(factor, dtype=dtype)))
        engine.step()
        momentum.append(next(state["momentum_buffer"].clone() for state in engine.optimizer.optimizer.state.values()
                             if "momentum_buffer" in state))
    return engine.skipped_steps == 1 and not torch.equal(*momentum)


try:
    wrong = [name for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if is_wrong(name, dtype)]
except AssertionError as error:
    print(f"cannot run: {error}")
    sys.exit(77)
print(f"precisions in which a skipped update changes the momentum: expected none, found {wrong or 'none'}")
sys.exit(1 if wrong else 0)
