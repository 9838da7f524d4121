"""One rank of the rollback tests: skip the update of a spike, roll back, and compare with a fresh resume."""

import gc
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.checkpoint.format.run_checkpoints import newest_good
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.load.resume import checkpoints_folder
from pretrain.checkpoint.save.retention import position_after
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import gather
from pretrain.engine.steps import grad_norm, learning_rate, loss_scale, open_loader, train_batch
from pretrain.engine.update_guard import guard_updates, skipped_update
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.guard import BadSteps, Guard
from pretrain.resilience.rollback import roll_back
from pretrain.terminal import Screen
from tests.distributed.workers.worker import Case, end, engine_of, plan_of, state_hash
from tests.support.cases_loop import each_case
from tests.support.own_memory import anonymous_bytes

SAVED, BAD, AFTER = 2, 2, 3  # steps before the checkpoint, bad steps after it, and steps after the rollback


def train(engine: Any, plan: Plan, first: int, last: int, *, position: int, factor: float = 1.0) -> list[list[float]]:
    """Train the steps `first` to `last` - 1 from a data position. Return the metrics of each step on all ranks.

    `factor` multiplies the losses of this run's second rank; with pipeline stages, of the last stage.
    """
    loader, rows = open_loader(engine, plan, "train"), []
    for _ in range(first, last):
        micro_batches = loader.step(position)
        if dist.get_rank() == 1:
            for _, (_, weights_BT) in micro_batches:
                weights_BT.mul_(factor)
        lr = learning_rate(engine)
        loss = float(train_batch(engine, micro_batches))
        rows.append([loss, grad_norm(engine), lr, loss_scale(engine), engine.skipped_steps])
        position += plan.length.batch_sizes.at(position)
    loader.close()
    return rows


def veto_spike(engine: Any, guard: Guard, plan: Plan) -> dict[str, Any]:
    """Train a step whose loss is a spike. Return the hashes before and after it."""
    for step in range(plan.args.spike_window):
        for window in guard._windows:
            window.add(step, 5 + 0.1 * (step % 2))
    before = state_hash(engine)
    (row,) = train(engine, plan, SAVED, SAVED + 1, position=0, factor=1e2)
    skipped = skipped_update(engine)
    result = {"hashes": [before, state_hash(engine)], "reason": skipped and skipped.reason, "loss": row[0]}
    for window in guard._windows:
        window.forget_after(-1)
    return result


def compare(case: Case) -> dict[str, Any]:
    """Roll back a run in which bad steps follow a checkpoint; then resume from this checkpoint in a new engine."""
    plan = plan_of(case)
    samples_after = plan.length.samples_after
    folder, screen = RunFolder(Path(plan.args.save), active=dist.get_rank() == 0), Screen(active=False)
    engine, saver = engine_of(plan), Saver(plan, folder, screen)
    guard = Guard(plan, engine, folder, screen)
    guard_updates(engine, guard.veto)
    train(engine, plan, 0, SAVED, position=0)
    saver.save(engine, step=SAVED, consumed_samples=samples_after(SAVED), eval_loss=None, wait=True)
    veto = veto_spike(engine, guard, plan)
    train(engine, plan, SAVED, SAVED + 1, position=samples_after(SAVED))
    poisoned = train(engine, plan, SAVED + 1, SAVED + BAD, position=samples_after(SAVED + 1), factor=float("nan"))
    gc.collect()
    before_bytes = anonymous_bytes()
    step, consumed = roll_back(engine, plan, saver, folder, screen, BadSteps(
        "a test", first_step=SAVED + 1, last_step=SAVED + BAD, consumed_samples=samples_after(SAVED + BAD),
        weights_changed=True))
    gc.collect()
    grown_bytes = anonymous_bytes() - before_bytes
    rolled_back = train(engine, plan, step, step + AFTER, position=consumed)
    hashes, counters = [state_hash(engine)], [[engine.global_steps, engine.skipped_steps, engine.global_samples]]
    saver.close(wait_for_copies=True)
    end(engine)

    engine = engine_of(plan)
    guard_updates(engine)
    found = newest_good(checkpoints_folder(plan))
    assert found is not None
    load_checkpoint(engine, plan, found[0], found[1])
    resumed = train(engine, plan, found[1].step, found[1].step + AFTER,
                    position=position_after(checkpoints_folder(plan), found[1]))
    hashes.append(state_hash(engine))
    counters.append([engine.global_steps, engine.skipped_steps, engine.global_samples])
    end(engine)
    return {"veto": veto, "position": [step, consumed], "expected": [SAVED, samples_after(SAVED + BAD + 1)],
            "poisoned": poisoned, "rows": [rolled_back, resumed], "hashes": hashes, "counters": counters,
            "ranks_agree": all(rows == rolled_back for rows in gather(rolled_back)), "grown_bytes": grown_bytes}


if __name__ == "__main__":
    each_case(lambda case: globals()[case["job"]](case))
