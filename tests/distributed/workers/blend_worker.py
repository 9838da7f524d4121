"""One rank of the blend tests: train on a blend in one layout, from step 0 or from a checkpoint of another layout."""

import hashlib
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.save_checkpoint import save_checkpoint
from pretrain.config.plan import Plan
from pretrain.data.data_spec import names_of_split
from pretrain.distributed.collectives import gather
from pretrain.engine.steps import eval_batch, open_loader
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, steps
from tests.support.cases_loop import each_case


def run(case: Case) -> dict[str, Any]:
    """Train from step `first` to the end, save at step `saved`, and evaluate each validation set at the end.

    Returns the losses, the evaluation losses by name, and the hash of the samples that all ranks together have read.
    """
    plan = plan_of(case)
    engine = engine_of(plan)
    first, batch = case["first"], plan.layout.global_batch_size
    if first:
        source = Path(case["source"])
        load_checkpoint(engine, plan, source, read_manifest(source))
    saved = case.get("saved", first)
    losses = steps(engine, plan, first, saved)["loss"]
    if saved > first:
        save_checkpoint(engine, plan, Path(plan.args.save) / "checkpoints", step=saved, consumed_samples=saved * batch,
                        versions={})
    losses += steps(engine, plan, saved, plan.train_steps)["loss"]
    found = {}
    for name in names_of_split(plan.datasets, "valid"):
        loader = open_loader(engine, plan, name)
        found[name] = float(eval_batch(engine, loader.step(0)))
        loader.close()
    result = {"loss": losses, "valid": found, "samples": _samples(engine, plan, first)}
    end(engine)
    return result


def _samples(engine: Any, plan: Plan, first: int) -> list[str]:
    """Return the hash of the samples of each step, in order of their content: layouts read them in another order."""
    loader, hashes = open_loader(engine, plan, "train"), []
    for step in range(first, plan.train_steps):
        rows = [row.tolist() for (tokens, *_), _ in loader.step(step * plan.layout.global_batch_size)
                for row in (tokens[0] if isinstance(tokens, tuple) else tokens)]
        every = {str(row) for rows_of_rank in gather(rows) for row in rows_of_rank}
        hashes.append(hashlib.sha256("".join(sorted(every)).encode()).hexdigest())
    loader.close()
    return hashes


if __name__ == "__main__":
    each_case(run)
