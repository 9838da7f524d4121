"""One rank of the tests of wrapped decoders: initial weights, buffers in checkpoints and dtypes of an engine."""

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.distributed.collectives import gather
from tests.distributed.workers import layout_worker
from tests.distributed.workers.worker import Case, end, engine_of, plan_of
from tests.support.cases_loop import each_case


def state(case: Case) -> dict[str, Any]:
    """Build an engine, load `source` if there is one, change the buffers by `add`, and save.

    Returns the sum of the absolute values of each parameter, the values of persistent buffers, and all dtypes.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    if "source" in case:
        load_checkpoint(engine, plan, Path(case["source"]), read_manifest(Path(case["source"])))
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.arange(buffer.numel()) * case.get("add", 0))
    sums = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
            sums[name] = float(parameter.detach().double().abs().sum())
    buffers = dict(engine.module.named_buffers())
    saved = save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=0, consumed_samples=0,
                            versions={})
    found = gather((sums, {name: values.float().flatten()[:8].tolist() for name, values in buffers.items()},
                    {name: str(values.dtype) for name, values in buffers.items()}))
    end(engine)
    parts = [{key: value for part in found for key, value in part[index].items()} for index in range(3)]
    return {"sums": parts[0], "buffers": parts[1], "dtypes": parts[2], "folder": str(saved.folder.absolute())}


if __name__ == "__main__":
    each_case(lambda case: (state if case["job"] == "state" else getattr(layout_worker, case["job"]))(case))
