"""One rank of a test: build an engine for each case of a JSON file, and return the results.

A case: {"name", "job" (a function of this file), "config" (DeepSpeed JSON), "flags" (of train.py), ...}.
"""

import gc
import hashlib
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.load.start import Start, check_start
from pretrain.checkpoint.save import save_checkpoint as save_module
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import gather
from pretrain.distributed.device import detect_device
from pretrain.engine.build import build_engine
from pretrain.engine.steps import (
    eval_batch,
    grad_norm,
    learning_rate,
    loss_scale,
    open_loader,
    train_batch,
)
from pretrain.errors import CorruptionError
from pretrain.model.layer_specs import as_module
from pretrain.monitor.read_run_folder import read_rows
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.replicas import ReplicaCheck, compare_copies, replicated_tensors
from tests.support.callback_runs import run_of
from tests.support.cases_loop import each_case

Case = dict[str, Any]


def plan_of(case: Case) -> Plan:
    return start_of(case).plan


def start_of(case: Case) -> Start:
    path = Path(case["config"]) if isinstance(case["config"], str) else Path(f"{case['name']}.json")
    if dist.get_rank() == 0 and not isinstance(case["config"], str):
        path.write_text(json.dumps(case["config"]))
    dist.barrier()
    flags = [word for key, value in case["flags"].items()
             for word in ([f"--{key}", *value] if isinstance(value, list) else [f"--{key}={value}"])]
    return check_start(parse_arguments([f"--deepspeed_config={path}", f"--save=run-{case['name']}", *flags]),
                       world_size=dist.get_world_size(), device=detect_device())


def engine_of(plan: Plan) -> deepspeed.DeepSpeedEngine:
    groups.mpu = None  # as in each_case: otherwise this engine would use the topology of the last pipeline
    return build_engine(plan)


def steps(engine: deepspeed.DeepSpeedEngine, plan: Plan, first: int, last: int) -> dict[str, list[float]]:
    """Train the steps `first` to `last` - 1, and return the metrics of each step."""
    loader = open_loader(engine, plan, "train")
    rows: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": [], "loss_scale": [], "skipped": []}
    for step in range(first, last):
        rows["lr"].append(learning_rate(engine))
        rows["loss"].append(float(train_batch(engine, loader.step(plan.length.samples_after(step)))))
        rows["grad_norm"].append(grad_norm(engine))
        rows["loss_scale"].append(loss_scale(engine))
        rows["skipped"].append(engine.skipped_steps)
    loader.close()
    return rows


def end(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.destroy()
    gc.collect()


def state_hash(engine: deepspeed.DeepSpeedEngine) -> str:
    """Hash the optimizer state of every rank (master weights, Adam's states, step counts) and the 16-bit weights."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if torch.is_tensor(value):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                if key not in ("param_slice_mappings", "ds_version", "overflow"):
                    digest.update(str(key).encode())
                    add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif hasattr(value, "__dict__"):
            add(vars(value))
        else:
            digest.update(repr(float(value) if type(value) is int else value).encode())  # equal hash of 512 and 512.0

    add(engine.optimizer.state_dict())
    for _, parameter in sorted(engine.module.named_parameters()):
        add(parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return " ".join(digests)


def losses(case: Case) -> dict[str, Any]:
    """Train, then evaluate once; return the losses."""
    plan = plan_of(case)
    engine = engine_of(plan)
    rows: dict[str, Any] = steps(engine, plan, 0, plan.train_steps)
    loader = open_loader(engine, plan, "valid")
    rows["eval_loss"] = float(eval_batch(engine, loader.step(0)))
    rows["optimizer"] = type(engine.optimizer).__name__
    rows["muon"] = [name for name, weight in engine.module.named_parameters() if getattr(weight, "use_muon", False)]
    rows["pipeline"] = isinstance(engine, PipelineEngine)
    rows["differing_copies"] = compare_copies(engine)
    rows["copies"] = [len(copies.tensors) for copies in replicated_tensors(engine)]
    loader.close()
    end(engine)
    return rows


def kept(case: Case) -> dict[str, Any]:
    """Train, and return the losses and the bytes that autograd kept for the backward passes of the first step.

    The bytes do not include what a recomputed part keeps while it is recomputed, nor its copies in host memory.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    weights = {weight.untyped_storage()._cdata for weight in engine.module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows: dict[str, Any] = steps(engine, plan, 0, 1)
    rows["kept_bytes"] = sum(storage.nbytes() for storage in storages.values())
    tail = steps(engine, plan, 1, plan.train_steps)
    rows = {name: values + tail[name] if name in tail else values for name, values in rows.items()}
    end(engine)
    return rows


def resume(case: Case) -> dict[str, Any]:
    """Train 2n steps without interruption. Then resume from the checkpoint of step n in a new engine."""
    plan = plan_of(case)
    half, folder = plan.train_steps // 2, Path(plan.args.save) / "checkpoints"
    engine = engine_of(plan)
    rows = steps(engine, plan, 0, half)
    folder = save_checkpoint(engine, plan, folder, step=half, consumed_samples=half * plan.layout.global_batch_size,
                             versions={}).folder
    at_save = state_hash(engine)
    tail = steps(engine, plan, half, plan.train_steps)
    at_end = state_hash(engine)
    end(engine)
    engine = engine_of(plan)
    steps(engine, plan, 0, 1)  # so that the load must replace weights and states
    read_files: list[str] = []
    load_pickle = save_module.load_pickle
    with patch.object(save_module, "load_pickle", lambda path: read_files.append(path.name) or load_pickle(path)):
        load_checkpoint(engine, plan, folder, read_manifest(folder))
    loaded = state_hash(engine)
    again = steps(engine, plan, half, plan.train_steps)
    result = {"before": rows, "tail": tail, "resumed": again, "state": [at_save, loaded, at_end, state_hash(engine)],
              "read_files": gather(read_files)}
    end(engine)
    return result


def overflow(case: Case) -> dict[str, Any]:
    """Train six steps in fp16, of which the second overflows because of loss weights of 1e30."""
    plan = plan_of(case)
    engine = engine_of(plan)
    loader = open_loader(engine, plan, "train")
    rows: dict[str, Any] = {"scale": [], "skipped": [], "lr": [], "state": []}
    for step in range(6):
        micro_batches = loader.step(step * plan.layout.global_batch_size)
        if step == 1:
            for _, (_, weights_BT) in micro_batches:
                weights_BT.mul_(1e30)
        train_batch(engine, micro_batches)
        rows["scale"].append(loss_scale(engine))
        rows["skipped"].append(engine.skipped_steps)
        rows["lr"].append(learning_rate(engine))
        rows["state"].append(weights_hash(engine))
    loader.close()
    end(engine)
    return rows


def flipped_bit(case: Case) -> dict[str, Any]:
    """Train with a replica check every two steps, and flip one bit on the last rank after an even step.

    Returns the result of each check, the events, the name of the tensor, and the step time and check time in ms.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    folder = RunFolder(Path(plan.args.save), active=dist.get_rank() == 0)
    check, found, run = ReplicaCheck(2), [], run_of(plan, engine, folder=folder)
    for step in range(1, 5):
        steps(engine, plan, step - 1, step)
        if step == 4:
            name = flip_bit(engine, case["tensor"], bit=case["bit"])
        try:
            run.step = step
            check.accepted(run)
            found.append("")
        except CorruptionError as error:
            found.append(str(error))
    began = time.perf_counter()
    compare_copies(engine)
    check_ms = 1000 * (time.perf_counter() - began)
    began = time.perf_counter()
    steps(engine, plan, 4, 5)
    result = {"checks": gather(found), "events": [row["reason"] for row in read_rows(folder.path / "events.jsonl")],
              "name": name,
              "step_ms": 1000 * (time.perf_counter() - began), "check_ms": check_ms}
    end(engine)
    return result


def flip_bit(engine: deepspeed.DeepSpeedEngine, end_of_name: str, *, bit: int) -> str:
    """Flip one bit of the middle element of a tensor on the last rank. Returns the tensor's name."""
    name, tensor = next((name, tensor) for copies in reversed(replicated_tensors(engine))
                        for name, tensor in copies.tensors.items() if name.endswith(end_of_name))
    if dist.get_rank() == dist.get_world_size() - 1:
        words = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        words[len(words) // 2] ^= -1 << bit if bit == 8 * words.element_size() - 1 else 1 << bit
    return name


def weights_hash(engine: deepspeed.DeepSpeedEngine) -> str:
    """Hash this rank's 16-bit weights."""
    digest = hashlib.sha256()
    for _, parameter in sorted(engine.module.named_parameters()):
        tensor = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def two_steps(case: Case) -> dict[str, Any]:
    """Train two steps. The DeepSpeed JSON may be given as the path of a file."""
    plan = plan_of(case)
    engine = engine_of(plan)
    rows = steps(engine, plan, 0, 2)
    result = {**rows, "stage": engine.zero_optimization_stage(), "precision": plan.layout.precision,
              "stages": plan.layout.pipeline_stages, "before": initial_loss_bound(plan)}
    end(engine)
    return result


def mup(case: Case) -> dict[str, Any]:
    """Train; return the losses, the rate and weight decay of each parameter, and mean absolute activations at the end.

    The activations belong to a fixed batch: outputs of each block's attention and MLP, and the logits.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    groups_of = {id(parameter): group for group in engine.optimizer.param_groups for parameter in group["params"]}
    rates = {name: [groups_of[id(parameter)][key] for key in ("lr", "weight_decay")]
             for name, parameter in engine.module.named_parameters() if id(parameter) in groups_of}
    rows: dict[str, Any] = steps(engine, plan, 0, plan.train_steps)
    state, sizes = engine.module.state_dict(), {}
    if plan.layout.pipeline_stages == 1 and plan.layout.zero_stage < 3:
        module = as_module(plan.model)
        module.load_state_dict(state)
        tokens = torch.arange(4 * 32).view(4, 32) * 7 % plan.model.vocab_size
        watched = [name for name, _ in module.named_modules() if name.endswith(("attention", "mlp", "lm_head"))]
        for name in watched:
            module.get_submodule(name).register_forward_hook(
                lambda *call, name=name: sizes.update({name: float(call[-1].abs().mean())}))
        module.eval()(tokens)
    end(engine)
    return {**rows, "rates": rates, "sizes": sizes}


def initial_loss_bound(plan: Plan) -> float:
    return float(torch.tensor(float(plan.model.vocab_size)).log())


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
