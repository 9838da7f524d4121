"""One rank of tests/distributed/test_upstream.py: run the cases of a JSON file.

The cases have the format of `worker.py`.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.engine.build import deepspeed_output
from pretrain.engine.patches import zero
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from tests.distributed.workers.worker import Case, end, engine_of, losses, plan_of, resume, steps
from tests.support.cases_loop import each_case

__all__ = ["losses", "resume"]  # jobs


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def complete_weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return copies of the model's complete weights, gathered under ZeRO-3."""
    weights = {}
    for name, parameter in engine.module.named_parameters():
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            weights[name] = parameter.detach().cpu().clone()
    return weights


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference over the names of `ours`."""
    return max(float((value.float() - theirs[name].float()).abs().max()) for name, value in ours.items())



def train(case: Case) -> dict[str, Any]:
    """Train; return the metrics of each step and the final difference of the tied weight between pipeline stages."""
    plan = plan_of(case)
    engine = engine_of(plan)
    rows: dict[str, Any] = steps(engine, plan, 0, plan.train_steps)
    rows["optimizer"] = type(engine.optimizer).__name__
    copies = gathered(engine.module.tied_modules["embed"].embedding.detach().float())
    rows["tied_difference"] = float((copies[0] - copies[1]).abs().max())
    end(engine)
    return rows


def construction(case: Case) -> dict[str, Any]:
    """Return the state of FP16_Optimizer before its first step: fp32 minus fp16 weights, and Adam's step count."""
    engine = engine_of(plan_of(case))
    pairs = zip(engine.optimizer.fp32_groups_flat, engine.optimizer.fp16_groups_flat, strict=True)
    result = {"difference": max(float((master.float() - half.float()).abs().max()) for master, half in pairs),
              "adam_steps": sum(int(state["step"]) for state in engine.optimizer.optimizer.state.values())}
    end(engine)
    return result


def nvme(case: Case) -> dict[str, Any]:
    """Train 2 steps on NVMe, save, train 2 more; then consolidate the checkpoint and resume with and without NVMe."""
    plan = plan_of(case)
    folder = Path(plan.args.save) / "checkpoints"
    engine = engine_of(plan)
    swapped = [engine.optimizer._swappable_optimizer_subgroup(i) for i in range(len(engine.optimizer.fp16_groups))]
    steps(engine, plan, 0, 2)
    saved = save_checkpoint(engine, plan, folder, step=2,
                            consumed_samples=2 * plan.layout.global_batch_size, versions={}).folder
    weights = complete_weights(engine)
    result: dict[str, Any] = {"swapped": swapped, "tail": steps(engine, plan, 2, 4)}
    final = complete_weights(engine)
    end(engine)

    def consolidated() -> float:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=saved.name)
        return largest_difference(weights, {name: value.bfloat16() for name, value in state.items()})

    def resumed(ds_config: dict[str, Any]) -> dict[str, Any]:
        again = engine_of(dataclasses.replace(plan, ds_config=copy.deepcopy(ds_config)))
        steps(again, plan, 0, 1)  # so that the load must replace weights and states
        load_checkpoint(again, plan, saved, read_manifest(saved))
        found = {"loaded": largest_difference(weights, complete_weights(again)), "tail": steps(again, plan, 2, 4),
                 "final": largest_difference(final, complete_weights(again))}
        end(again)
        return found

    on_cpu = copy.deepcopy(plan.ds_config)
    on_cpu["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    result["consolidated"] = consolidated()
    result["nvme"], result["cpu"] = resumed(plan.ds_config), resumed(on_cpu)
    return result


def initial_weights(case: Case) -> dict[str, Any]:
    """Compare an engine's initial weights with a plain module's. Also return the seeds of the ranks."""
    plan = plan_of(case)
    engine = engine_of(plan)
    module = as_module(plan.model)
    initialize_parameters(module, plan.model, seed=plan.args.seed)
    mine = {name: value.to(torch.bfloat16) for name, value in module.state_dict().items()}
    weights = complete_weights(engine)
    blocks = gathered({name: value for name, value in weights.items() if name.endswith("attention.out.weight")})
    result = {"difference": max(gathered(largest_difference(weights, mine))), "seeds": gathered(torch.initial_seed()),
              "first_blocks": float((next(iter(blocks[0].values())) - next(iter(blocks[1].values()))).abs().max())}
    end(engine)
    return result


def partition_dtypes(case: Case) -> list[str]:
    """Return the dtypes of weights that `zero.Init` partitions in fp32 and in fp16, on a device without fp16."""
    zero.keep_dtype_of_partitions()
    found = []
    with patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: False):
        for dtype in (torch.float32, torch.float16):
            with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}},
                                     dtype=dtype):
                found.append(str(nn.Linear(8, 8).weight.ds_tensor.dtype))
    return found


def run(case: Case) -> Any:
    with deepspeed_output("error"):
        return globals()[case["job"]](case)


if __name__ == "__main__":
    each_case(run)
