"""One rank of tests/distributed/test_upstream.py: run the cases of a JSON file, with our patches or without.

The cases have the format of `worker.py`. With "plain": true, our model runs in unpatched DeepSpeed.
"""

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.config.plan import Plan
from pretrain.engine.build import deepspeed_output
from pretrain.engine.patches import zero
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module
from tests.distributed.workers import worker
from tests.distributed.workers.worker import Case, end, engine_of, losses, plan_of, steps
from tests.support.cases_loop import each_case

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}

__all__ = ["losses"]  # a job


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def plain_deepspeed() -> Iterator[None]:
    """Run our model and loop in unpatched DeepSpeed."""

    def save(engine: deepspeed.DeepSpeedEngine, plan: Plan, folder: Path, *, step: int,
             **_: Any) -> SimpleNamespace:
        engine.save_checkpoint(str(folder), tag=f"global_step{step}")
        return SimpleNamespace(folder=folder / f"global_step{step}")

    def load(engine: deepspeed.DeepSpeedEngine, plan: Plan, folder: Path, manifest: None) -> None:
        engine.load_checkpoint(str(folder.parent), tag=folder.name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("pretrain.engine.build.apply_patches", lambda engine, update: None))
        stack.enter_context(patch.object(InsertPostInitMethodToModuleSubClasses, "_set_dtype", zero._set_dtype))
        for module in (worker, sys.modules[__name__]):
            for name, function in (("save_checkpoint", save), ("load_checkpoint", load),
                                   ("read_manifest", lambda folder: None)):
                stack.enter_context(patch.object(module, name, function))
        yield


def outcome(action: Callable[[], Any]) -> Any:
    """Return the result of `action`, or "Type: message" of its error, which is the same on every rank."""
    try:
        return action()
    except Exception as error:  # the test checks type and message
        return f"{type(error).__name__}: {error}"


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


# --- cases with our model

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


def resume(case: Case) -> Any:
    return outcome(lambda: worker.resume(case))


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
    result["consolidated"] = outcome(consolidated)
    result["nvme"] = outcome(lambda: resumed(plan.ds_config))
    result["cpu"] = outcome(lambda: resumed(on_cpu))
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


# --- cases with DeepSpeed alone

def initialize(module: nn.Module, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, **config}
    config["zero_optimization"] = {"reduce_bucket_size": 100_000, **config.get("zero_optimization", {})}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    return engine


def nvme_below_stage_3(case: Case) -> dict[str, Any]:
    """Run a step of ZeRO-2 with NVMe offload of the optimizer, and return the location of the optimizer states."""
    folder = Path(case["folder"])
    offload = {"device": "nvme", "nvme_path": str(folder)}
    engine = initialize(nn.Linear(512, 512), {"bf16": {"enabled": True},
                                              "zero_optimization": {"stage": 2, "offload_optimizer": offload}})
    engine.backward(engine(torch.ones(2, 512, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    state = [tensor for values in engine.optimizer.optimizer.state.values() for tensor in values.values()
             if torch.is_tensor(tensor) and tensor.numel() > 1]
    result = {"cpu_offload": engine.optimizer.cpu_offload, "bytes_in_memory": sum(t.nbytes for t in state),
              "files": len([path for path in folder.rglob("*") if path.is_file()])}
    end(engine)
    return result


def autocast_norm(case: Case) -> dict[str, float]:
    """Return the gradient norm that ZeRO-2 reports under torch_autocast in fp16, and the true norm."""
    torch.manual_seed(0)
    module, inputs = nn.Linear(16, 1, bias=False), 0.01 * torch.randn(2, 16)  # small, so that scaled values fit in fp16
    twin = copy.deepcopy(module)
    twin(inputs).square().mean().backward()
    engine = initialize(module, {"torch_autocast": {"enabled": True, "dtype": "float16"}, "gradient_clipping": 1.0,
                                 "zero_optimization": {"stage": 2}})
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    result = {"reported": float(engine.get_global_grad_norm()), "true": float(twin.weight.grad.norm())}
    end(engine)
    return result


class Parent(nn.Module):
    """A module that initializes its child's weight after zero.Init has partitioned it."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)
        nn.init.constant_(self.child.weight, 3.0)


def init_in_parent(case: Case) -> list[float]:
    """Return the smallest and largest weight of a child that its parent has set to 3."""
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        module = Parent()
    with deepspeed.zero.GatheredParameters([module.child.weight]):
        return [float(module.child.weight.min()), float(module.child.weight.max())]


def partition_dtypes(case: Case) -> list[str]:
    """Return the dtypes of weights that `zero.Init` partitions in fp32 and in fp16, on a device without fp16."""
    if not case["plain"]:
        zero.keep_dtype_of_partitions()
    found = []
    with patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: False):
        for dtype in (torch.float32, torch.float16):
            with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}},
                                     dtype=dtype):
                found.append(str(nn.Linear(8, 8).weight.ds_tensor.dtype))
    return found


def equal_stages(case: Case) -> bool:
    """Return whether two pipeline stages that torch initializes start with the same weights."""
    torch.manual_seed(0)
    module = PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(4)], num_stages=2, partition_method="uniform")
    stages = gathered([parameter.detach().clone() for parameter in module.parameters()])
    return all(torch.equal(first, second) for first, second in zip(*stages, strict=True))


def unknown_key(case: Case) -> int:
    """Return the ZeRO stage of a JSON that misspells "zero_optimization"."""
    return int(DeepSpeedConfig({"train_batch_size": 2, "zero_optimisation": {"stage": 2}}).zero_optimization_stage)


def sequence_parallel_pipeline(case: Case) -> list[int]:
    """Return the sequence- and data-parallel sizes of a pipeline whose JSON splits sequences over both ranks."""
    module = PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(2)], num_stages=1, loss_fn=nn.MSELoss())
    engine = initialize(module, {"sequence_parallel_size": 2, "gradient_accumulation_steps": 1})
    result = [engine.sequence_parallel_size, engine.dp_world_size]
    end(engine)
    return result


def run(case: Case) -> Any:
    with deepspeed_output("error"), plain_deepspeed() if case.get("plain") else contextlib.nullcontext():
        return globals()[case["job"]](case)


if __name__ == "__main__":
    each_case(run)
