"""AdamW with 8-bit states, from the package bitsandbytes, which DeepSpeed's JSON does not offer.

DeepSpeed accepts a function that makes the optimizer (runtime/engine.py, _configure_optimizer). This path needs CUDA;
the tests run it with a stand-in for the package.
"""

from collections.abc import Callable
from typing import Any

import torch

from pretrain.config.validate import Plan

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def eight_bit_optimizer(plan: Plan) -> tuple[MakeOptimizer | None, dict[str, Any]]:
    """Return the function that makes the 8-bit optimizer, and the JSON without its "optimizer" block.

    For all other optimizers, return None and the plan's JSON: DeepSpeed makes them.
    """
    if plan.layout.optimizer != "adamw8bit":
        return None, plan.ds_config
    from bitsandbytes.optim import AdamW8bit

    params = plan.ds_config["optimizer"]["params"]

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = AdamW8bit(groups, **params)
        return optimizer

    return make, {key: value for key, value in plan.ds_config.items() if key != "optimizer"}
