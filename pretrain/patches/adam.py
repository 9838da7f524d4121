"""Defect L: Adam on the CPU corrects its bias differently after a resume.

Guarded by tests/distributed/test_upstream.py, test_l_*.
"""

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam


def make_bias_correction_stateless(optimizer: torch.optim.Optimizer) -> None:
    """Make the bias correction of Adam's CPU kernels a function of the step number alone.

    DeepSpeed 0.19.8 (csrc/includes/cpu_adam.h, IncrementStep): the kernels update beta^step as a running product of
    fp32 factors, but compute it by pow() after a resume. The last bits of the correction differ, and therefore those of
    the weights. A call with step 0 on an empty tensor before each step resets the product, so that the kernels always
    use pow().
    """
    empty = [torch.empty(0) for _ in range(4)]
    if isinstance(optimizer, DeepSpeedCPUAdam):
        def reset(*_: Any) -> None:
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, 0.0, *optimizer.defaults["betas"], 1.0, 0.0, True,
                                              *empty)
    elif isinstance(optimizer, FusedAdam) and optimizer._dummy_overflow_buf.device.type == "cpu":
        def reset(*_: Any) -> None:
            optimizer.multi_tensor_adam(1, optimizer._dummy_overflow_buf, [[tensor] for tensor in empty], 0.0,
                                        *optimizer.defaults["betas"], 1.0, 0, optimizer.adam_w_mode, 1, 0.0)
    else:
        return
    optimizer.register_step_pre_hook(reset)
