"""DeepSpeed: Adam on the CPU gives other bits after a resume.

csrc/includes/cpu_adam.h (IncrementStep) updates beta^step as a running product of fp32 factors, but computes it with
pow() after a resume, when the step does not follow the last one.

python l_cpu_adam_resume.py    exit code 0: correct; 1: the defect exists; 77: cannot run here
"""

import copy
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

parameter = torch.nn.Parameter(torch.ones(1000))
optimizer = DeepSpeedCPUAdam([parameter], lr=0.01, betas=(0.9, 0.95))
before: dict[int, Any] = {}  # step -> weights and optimizer state before this step


def train(first: int) -> torch.Tensor:
    """Train from step `first` to step 30, with the weights and the state that the first run had there."""
    if first in before:
        parameter.data.copy_(before[first][0])
        optimizer.load_state_dict(before[first][1])
    for step in range(first, 30):
        before.setdefault(step, (parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())))
        parameter.grad = torch.sin(torch.arange(1000.0) + step)
        optimizer.step()
    return parameter.detach().clone()


uninterrupted = train(0)
different = [step for step in range(2, 20) if not torch.equal(train(step), uninterrupted)]
print(f"resumes at steps 2 to 19 that change the weights of step 30: expected none, found {different or 'none'}")
sys.exit(1 if different else 0)
