"""One rank of the layout tests: train and save in one layout, or resume from a checkpoint of another layout."""

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.utils import groups

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.format.fragments import base_optimizer, flat_tensors, group_of
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.agree_on_checkpoint import verify_weights
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint, load_weights
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.distributed.collectives import from_rank_0, gather
from pretrain.distributed.device import cpu_device
from pretrain.engine.build import build_engine
from pretrain.engine.steps import open_loader, train_batch
from pretrain.errors import ConfigError
from tests.distributed.workers.nonfinite import found_by_each_rank
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, start_of, steps
from tests.support.cases_loop import each_case
from tests.support.own_memory import MemoryWatch, anonymous_bytes


def train_and_save(case: Case) -> dict[str, Any]:
    """Train, save at `saved_step`, and continue training: the reference for the resumed runs."""
    plan = plan_of(case)
    engine = engine_of(plan)
    at = case["saved_step"]
    before = steps(engine, plan, 0, at)
    folder = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=at,
                             consumed_samples=at * plan.layout.global_batch_size, versions={}).folder
    after = steps(engine, plan, at, plan.train_steps)
    result = {"folder": str(folder.absolute()), "before": before, "after": after, "optimizer": _class(engine),
              "finite": found_by_each_rank(engine)}
    end(engine)
    return result


def write_samples(case: Case) -> dict[str, Any]:
    """Write the first 200 samples, in the order of training, into samples-NAME.npy: [samples, seq_length + 1]."""
    plan = plan_of(case)
    if dist.get_rank() == 0:
        np.save(f"samples-{case['name']}.npy", plan.datasets["train"].samples(np.arange(200)))
    return {}


def resume(case: Case) -> dict[str, Any]:
    """Train `used` steps, load a checkpoint of another layout into the same engine, save at once, and train."""
    plan = plan_of(case)
    engine = engine_of(plan)
    source, at = Path(case["source"]), case["saved_step"]
    steps(engine, plan, 0, case.get("used", 0))
    start = time.perf_counter()
    load_checkpoint(engine, plan, source, read_manifest(source))
    seconds = time.perf_counter() - start
    seeds = gather(torch.initial_seed())
    folder = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=at,
                             consumed_samples=at * plan.layout.global_batch_size, versions={}).folder
    after = steps(engine, plan, at, plan.train_steps if case.get("train", True) else at)
    result = {"folder": str(folder.absolute()), "after": after, "seconds": seconds, "optimizer": _class(engine),
              "seeds": seeds, "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
              "settings": _settings(engine)}
    end(engine)
    return result


def round_trip(case: Case) -> dict[str, Any]:
    """Train and save, and resume under each of the JSONs in `resumed_in`. Returns the results by name.

    Each result of a resume lists how its checkpoint, which was saved at once, differs from the first one.
    """
    found = {"saved": train_and_save(case)}
    source = Path(found["saved"]["folder"])
    for name, values in case["resumed_in"].items():
        found[name] = resume({**case, "name": f"{case['name']}-{name}", "config": values, "source": source, "used": 1,
                              "flags": {**case["flags"], "emulate_fp16": "fp16" in values}})
        folder = Path(found[name]["folder"])
        found[name]["differences"] = from_rank_0(lambda folder=folder: diff(source, folder))
    for result in found.values() if dist.get_rank() == 0 else ():
        shutil.rmtree(result["folder"])
    return found


def continue_run(case: Case) -> dict[str, Any]:
    """Continue from the checkpoint of --resume_from, with the settings that the resume keeps, and train to the end."""
    start = start_of(case)
    assert start.resume is not None
    plan, manifest = start.plan_to_run, start.resume.manifest
    engine = engine_of(plan)
    load_checkpoint(engine, plan, start.resume.folder, manifest)
    after = steps(engine, plan, manifest.step, plan.train_steps)
    result = {"after": after, "notes": [*plan.notes, *start.warnings],
              "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps]}
    end(engine)
    return result


def start_from_weights(case: Case) -> dict[str, Any]:
    """Load the weights of --init_from into a new engine, and train; save at `saved_step` (default: 0)."""
    start, at = start_of(case), case.get("saved_step", 0)
    groups.mpu = None
    assert start.weights is not None
    verify_weights(start.weights)
    engine = build_engine(start.plan, initialize=False)
    load_weights(engine, start.weights.files)
    before = steps(engine, start.plan, 0, at)
    folder = save_checkpoint(engine, start.plan, Path(start.plan.args.save) / "checkpoints", step=at,
                             consumed_samples=at * start.plan.layout.global_batch_size, versions={}).folder
    after = steps(engine, start.plan, at, start.plan.train_steps)
    rows = {key: before[key] + after[key] for key in before}
    result = {"folder": str(folder.absolute()), **rows, "counters": [engine.global_steps, engine.skipped_steps]}
    end(engine)
    return result


def features(case: Case) -> dict[str, Any]:
    """Return whether this CPU has fp16, for our check and for DeepSpeed's, and whether oneDNN has bf16.

    Also the precision of DeepSpeed's Muon.
    """
    return {"fp16": cpu_device().fp16, "fp16_of_deepspeed": bool(get_accelerator().is_fp16_supported()),
            "bf16_in_onednn": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
            "muon": str(original_muon.ns_compute_dtype("gram"))}


def load_and_fail(case: Case) -> dict[str, Any]:
    """Load a checkpoint that must be rejected, and return the error of each rank."""
    plan = plan_of(case)
    engine = engine_of(plan)
    source = Path(case["source"])
    message = "no error"
    try:
        load_checkpoint(engine, plan, source, read_manifest(source))
    except ConfigError as error:
        message = str(error)
    messages = gather(message)
    end(engine)
    return {"errors": messages}


def build_and_fail(case: Case) -> dict[str, Any]:
    """Build an engine that must be rejected, and return the error of each rank."""
    message = "no error"
    try:
        engine_of(plan_of(case))
    except ConfigError as error:
        message = str(error)
    return {"errors": gather(message)}


def load_universal(case: Case) -> dict[str, Any]:
    """Load a universal checkpoint with DeepSpeed's own load_checkpoint, save at once, and train."""
    plan = plan_of(case)
    plan.ds_config["checkpoint"] = {"load_universal": True}  # validation rejects this key for users
    engine = engine_of(plan)
    converted, at = Path(case["source"]), case["saved_step"]
    path, client_state = engine.load_checkpoint(str(converted.parent), tag=converted.name)
    assert path is not None
    folder = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=at,
                             consumed_samples=client_state["consumed_samples"], versions={}).folder
    after = steps(engine, plan, at, plan.train_steps)
    result = {"folder": str(folder.absolute()), "after": after, "counters": [engine.global_steps, engine.skipped_steps]}
    end(engine)
    return result


def decay(case: Case) -> dict[str, Any]:
    """Train a step with zero gradients, which changes only weights that decay.

    Returns name -> [weight decay of its group, ratio of its norm after and before the step], and the loss of real steps
    before it. A parameter whose norm was 0 has the ratio 1.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    rows = steps(engine, plan, 0, plan.train_steps - 1)
    decays = {fragment.name: base_optimizer(engine).param_groups[group_of(engine, flat)]["weight_decay"]
              for flat in flat_tensors(engine) for fragment in flat.fragments}
    loader, before = open_loader(engine, plan, "train"), _squares(engine)
    for state in base_optimizer(engine).state.values():  # without momentum
        for value in state.values():
            if torch.is_tensor(value) and value.dim() > 0:
                value.zero_()
    batches = loader.step(0)
    for _, (_, weights_BT) in batches:
        weights_BT.zero_()
    train_batch(engine, batches)
    after = _squares(engine)
    loader.close()
    end(engine)
    return {**rows, "decays": {name: [value, (after[name] / before[name]) ** 0.5 if before[name] else 1.0]
                               for found in gather(decays) for name, value in found.items()}}


def updates(case: Case) -> dict[str, Any]:
    """Train, and return the metrics, and name -> norm of the change of each parameter in the last step."""
    plan = plan_of(case)
    engine = engine_of(plan)
    rows = steps(engine, plan, 0, plan.train_steps - 1)
    before = [flat.parameter.detach().clone() for flat in flat_tensors(engine)]
    last = steps(engine, plan, plan.train_steps - 1, plan.train_steps)
    own: dict[str, float] = {}
    for flat, old in zip(flat_tensors(engine), before, strict=True):
        for part in flat.fragments:
            change = (flat.parameter.detach() - old).view(-1).narrow(0, part.offset, part.length).double()
            own[part.name] = own.get(part.name, 0.0) + float(change @ change)
    found = gather(own)
    muon = gather([name for name, weight in engine.module.named_parameters() if getattr(weight, "use_muon", False)])
    end(engine)
    return {**{key: rows[key] + last[key] for key in rows}, "muon": sorted({name for names in muon for name in names}),
            "changes": {name: sum(squares.get(name, 0.0) for squares in found) ** 0.5
                        for squares in found for name in squares}}


def eight_bit(case: Case) -> dict[str, Any]:
    """Train, save and resume with AdamW8bit, for which torch's AdamW stands in: no CUDA is needed."""
    class AdamW8bit(torch.optim.AdamW):
        """The mock of the class in bitsandbytes."""

    sys.modules["bitsandbytes"], sys.modules["bitsandbytes.optim"] = ModuleType("bitsandbytes"), ModuleType("optim")
    sys.modules["bitsandbytes.optim"].AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    plan = plan_of(case)
    plan = replace(plan, layout=replace(plan.layout, optimizer="adamw8bit"), ds_config={
        **plan.ds_config, "optimizer": {**plan.ds_config["optimizer"], "type": "AdamW8bit"},
        "zero_allow_untested_optimizer": True})
    engine = engine_of(plan)
    optimizer = _class(engine)
    steps(engine, plan, 0, 2)
    folder = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=2,
                             consumed_samples=2 * plan.layout.global_batch_size, versions={}).folder
    rows = steps(engine, plan, 2, 4)
    end(engine)
    engine = engine_of(plan)
    load_checkpoint(engine, plan, folder, read_manifest(folder))
    again = steps(engine, plan, 2, 4)
    end(engine)
    return {"loss": rows["loss"], "again": again["loss"], "optimizer": optimizer}


def _squares(engine: Any) -> dict[str, float]:
    """Return the sum of the squared fp32 weights of each parameter, over all ranks that hold a part of it."""
    own: dict[str, float] = {}
    for flat in flat_tensors(engine):
        for part in flat.fragments:
            values = flat.parameter.detach().view(-1).narrow(0, part.offset, part.length).double()
            own[part.name] = own.get(part.name, 0.0) + float(values @ values)
    found = gather(own)
    return {name: sum(squares.get(name, 0.0) for squares in found) for squares in found for name in squares}


def norm_reductions(case: Case) -> list[int]:
    """Return how often each rank's unpatched ZeRO optimizer reduces over the pipeline stages to compute a norm."""
    plan = plan_of(case)
    engine = engine_of(plan)
    optimizer, calls = engine.optimizer, []
    optimizer._model_parallel_all_reduce = lambda **call: calls.append(call)
    optimizer.averaged_gradients = {index: [] for index in range(len(optimizer.param_groups))}
    type(optimizer).scaled_global_norm(optimizer)
    counts = gather(len(calls))
    end(engine)
    return counts


def memory_of_load(case: Case) -> dict[str, Any]:
    """Load a large checkpoint into another layout. Return the anonymous memory before, at the peak, and afterwards."""
    plan = plan_of(case)
    engine = engine_of(plan)
    source = Path(case["source"])
    with MemoryWatch() as watch:
        load_checkpoint(engine, plan, source, read_manifest(source))
    result = {"before": watch.before, "peak": watch.peak, "after": anonymous_bytes()}
    end(engine)
    return result


def _settings(engine: Any) -> list[float]:
    """Return the optimizer's gradient clipping and loss scale window, which come from the JSON."""
    scaler = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
    return [getattr(engine.optimizer, "clip_grad", -1), getattr(scaler, "scale_window", -1)]


def _class(engine: Any) -> str:
    return f"{type(engine.optimizer).__name__}/{type(getattr(engine.optimizer, 'optimizer', None)).__name__}"


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
