"""One rank of tests/distributed/test_rejected_features.py: features in plain DeepSpeed, with a small model."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.support.cases_loop import each_case


def _engine(config: dict[str, Any], schedule: Any = None) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                      lr_scheduler=schedule)
    return engine


def _train(engine: deepspeed.DeepSpeedEngine, micro_batches: int) -> None:
    for _ in range(micro_batches):
        engine.backward(engine(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().mean())
        engine.step()


def partial_offload(case: dict[str, Any]) -> dict[str, Any]:
    """Train with "ratio" 0.5, as on a device that is not the CPU. Return the rates, and the saved optimizer states."""
    with patch.object(get_accelerator(), "_name", "cpu:0"):  # DeepSpeed compares this name with "cpu"
        engine = _engine(case["config"], lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step))
    _train(engine, 3)
    optimizer = engine.optimizer
    result = {"rates": [each.param_groups[0]["lr"] for each in (optimizer.optimizer, optimizer.backup_optimizer)],
              "on_device": sum(device != "cpu" for device in optimizer.subgroup_to_device.values()),
              "states_of_both": [len(each.state) for each in (optimizer.optimizer, optimizer.backup_optimizer)],
              "saved": len(optimizer.state_dict()["optimizer_state_dict"]["state"])}
    engine.destroy()
    return result


def zenflow(case: dict[str, Any]) -> dict[str, Any]:
    """Train 4 micro-batches with gradient_accumulation_steps 2. Return what the engine counts, and what it saves."""
    engine = _engine(case["config"])
    asked = case["config"]["gradient_accumulation_steps"]
    found = engine.gradient_accumulation_steps()
    _train(engine, 4)
    engine.save_checkpoint("checkpoints", tag=case["name"])
    files = Path("checkpoints", case["name"]).glob("*optim_states.pt")
    saved = [name for file in files for name in torch.load(file, weights_only=False)["optimizer_state_dict"]]
    result = {"steps": engine.global_steps, "asked": asked, "found": found,
              "selective": type(engine.optimizer.selective_optimizer).__name__, "saved": saved}
    engine.destroy()
    return result


def super_offload(case: dict[str, Any]) -> str:
    """Return the error of SuperOffload on a CPU."""
    try:
        _engine(case["config"]).destroy()
    except AssertionError as error:
        return str(error)
    return "runs"


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
