"""One rank of the layout tests: trains and saves in one layout, or goes on from a checkpoint of another."""

import time
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.distributed.collectives import gather
from pretrain.errors import ConfigError
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, steps
from tests.support.cases_loop import each_case
from tests.support.layouts import Watch, anonymous_bytes


def train_and_save(case: Case) -> dict[str, Any]:
    """Train up to the checkpoint, save, and go on: what the others are compared with."""
    plan = plan_of(case)
    engine = engine_of(plan)
    at = case["saved_step"]
    before = steps(engine, plan, 0, at)
    folder, *_ = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=at,
                                 consumed_samples=at * plan.layout.global_batch_size, versions={})
    after = steps(engine, plan, at, plan.train_steps)
    result = {"folder": str(folder.absolute()), "before": before, "after": after, "optimizer": _class(engine)}
    end(engine)
    return result


def go_on(case: Case) -> dict[str, Any]:
    """Load another layout's checkpoint over an engine that has trained a step (or none), save at once, and train."""
    plan = plan_of(case)
    engine = engine_of(plan)
    source, at = Path(case["source"]), case["saved_step"]
    steps(engine, plan, 0, case.get("used", 0))
    start = time.perf_counter()
    load_checkpoint(engine, plan, source, read_manifest(source))
    seconds = time.perf_counter() - start
    seeds = gather(torch.initial_seed())
    folder, *_ = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=at,
                                 consumed_samples=at * plan.layout.global_batch_size, versions={})
    after = steps(engine, plan, at, plan.train_steps if case.get("train", True) else at)
    result = {"folder": str(folder.absolute()), "after": after, "seconds": seconds, "optimizer": _class(engine),
              "seeds": seeds, "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
              "settings": _settings(engine)}
    end(engine)
    return result


def refused(case: Case) -> dict[str, Any]:
    """What each rank says when it is to load a checkpoint that it cannot."""
    plan = plan_of(case)
    engine = engine_of(plan)
    source = Path(case["source"])
    said = "nothing"
    try:
        load_checkpoint(engine, plan, source, read_manifest(source))
    except ConfigError as error:
        said = str(error)
    said_by_all = gather(said)
    end(engine)
    return {"said": said_by_all}


def load_universal(case: Case) -> dict[str, Any]:
    """Load with DeepSpeed's own load_checkpoint what was converted for it, save at once, and train."""
    plan = plan_of(case)
    plan.ds_config["checkpoint"] = {"load_universal": True}  # refused by check_run: --resume needs no conversion
    engine = engine_of(plan)
    converted, at = Path(case["source"]), case["saved_step"]
    path, client_state = engine.load_checkpoint(str(converted.parent), tag=converted.name)
    assert path is not None
    folder, *_ = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=at,
                                 consumed_samples=client_state["consumed_samples"], versions={})
    after = steps(engine, plan, at, plan.train_steps)
    result = {"folder": str(folder.absolute()), "after": after, "counters": [engine.global_steps, engine.skipped_steps]}
    end(engine)
    return result


def memory_of_load(case: Case) -> dict[str, Any]:
    """Load a large checkpoint into another layout: anonymous memory before, at its highest, and afterwards."""
    plan = plan_of(case)
    engine = engine_of(plan)
    source = Path(case["source"])
    with Watch() as watch:
        load_checkpoint(engine, plan, source, read_manifest(source))
    result = {"before": watch.before, "peak": watch.peak, "after": anonymous_bytes()}
    end(engine)
    return result


def _settings(engine: Any) -> list[float]:
    """What the JSON says of clipping and the loss scale, as the optimizer has it."""
    scaler = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
    return [getattr(engine.optimizer, "clip_grad", -1), getattr(scaler, "scale_window", -1)]


def _class(engine: Any) -> str:
    return f"{type(engine.optimizer).__name__}/{type(getattr(engine.optimizer, 'optimizer', None)).__name__}"


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
