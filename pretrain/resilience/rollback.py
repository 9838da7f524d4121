"""Return a running engine to an earlier checkpoint, and skip the samples that led to the bad steps.

PaLM's runs did the same by hand: after a spike, they restarted from a checkpoint of about 100 steps before it, and
skipped 200 to 500 batches of data, which removed the spike (arXiv 2204.02311, section 5.1).
"""

import time
from pathlib import Path

from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints
from pretrain.checkpoint.load.agree_on_checkpoint import find_damage_together, reject_foreign_pickles
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.load.resume import checkpoints_folder
from pretrain.checkpoint.save.commit import save_errors
from pretrain.checkpoint.save.mirror import withdraw
from pretrain.checkpoint.save.retention import (
    ABANDONED,
    ROLLBACKS,
    Rollback,
    later_checkpoints,
    read_rollbacks,
    record_rollback,
)
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import from_rank_0
from pretrain.engine.build import deepspeed_output
from pretrain.errors import ConfigError
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.guard import BadSteps, guard_error, has_no_update, remedy_for
from pretrain.terminal import Screen


def roll_back(engine: DeepSpeedEngine, plan: Plan, saver: Saver, folder: RunFolder, screen: Screen,
              bad: BadSteps) -> tuple[int, int]:
    """Load the newest good checkpoint from before the bad steps into the engine; collective.

    The record is written before training continues, so that a restart of the run also skips the samples. Returns the
    step of the checkpoint, and the number of consumed samples to continue with. Raises GuardError if there is no good
    checkpoint, or after --max_rollbacks; raises SaveError if the rollback cannot be recorded.
    """
    saver.wait()
    checkpoints = checkpoints_folder(plan)
    past = from_rank_0(lambda: read_rollbacks(checkpoints))
    remedy = remedy_for(engine, bad.last_step)
    _check_number(plan, len(past), folder, bad, remedy)
    found = _newest_good_before(checkpoints, past, bad)
    if found is None:
        raise guard_error(folder, bad.last_step, f"{bad.reason}. There is no good checkpoint to return to",
                          remedy + ("" if has_no_update(engine, bad.last_step) else
                                    ", or save more often (--save_interval)")
                          + (", or use --spike_policy warn" if bad.is_spike else ""))
    target, manifest = found
    consumed_samples = plan.length.batch_sizes.samples_after(plan.args.rollback_skip_steps,
                                                             first_sample=bad.consumed_samples)
    rollback = Rollback(
        time=time.time(), reason=bad.reason, bad_step=bad.first_step, last_step=bad.last_step, to_step=manifest.step,
        save_id=manifest.save_id, first_sample=manifest.consumed_samples, consumed_samples=consumed_samples,
        abandoned=from_rank_0(lambda: later_checkpoints(checkpoints, manifest.step)))
    from_rank_0(lambda: _record(plan, checkpoints, rollback, screen))
    with deepspeed_output(plan.args.deepspeed_log_level):
        load_checkpoint(engine, plan, target, manifest)
    saver.return_to(manifest.step)
    _report(plan, rollback, folder, screen, number=len(past) + 1)
    return manifest.step, consumed_samples


def _check_number(plan: Plan, number: int, folder: RunFolder, bad: BadSteps, remedy: str) -> None:
    """Raise GuardError if the run has already had all its rollbacks."""
    if number < plan.args.max_rollbacks:
        return
    raise guard_error(
        folder, bad.last_step,
        f"{bad.reason}. The run has had {number} of at most {plan.args.max_rollbacks} rollbacks (--max_rollbacks; see "
        f"{Path(plan.args.save) / ROLLBACKS})",
        f"{remedy}, and use another --save, or allow more rollbacks")


def _newest_good_before(checkpoints: Path, past: list[Rollback], bad: BadSteps) -> tuple[Path, Manifest] | None:
    """Return the checkpoint to return to, after its files were verified, or None; collective."""
    candidates = from_rank_0(lambda: _candidates(checkpoints, past, bad))
    for target, text in candidates:
        manifest = Manifest.from_json(text)
        if find_damage_together(target, manifest):
            continue
        try:
            reject_foreign_pickles(target, manifest)
        except ConfigError:
            continue
        return target, manifest
    return None


def _candidates(checkpoints: Path, past: list[Rollback], bad: BadSteps) -> list[tuple[Path, str]]:
    """List good checkpoints in the order of preference: folder, and text of manifest.json.

    First come those from before the bad steps, the newest first. If all bad updates were skipped, those saved between
    the bad steps have the same weights, and come next. A checkpoint that the run has already returned to comes last if
    the run has not got beyond that rollback's bad steps since: then this checkpoint did not help.
    """
    good = [(target, manifest) for target, manifest in complete_checkpoints(checkpoints)[0]
            if manifest.is_good and not manifest.weights_only
            and (manifest.step < bad.first_step or not bad.weights_changed)]
    failed = {(rollback.to_step, rollback.save_id) for rollback in past if rollback.last_step >= bad.first_step}
    good.sort(key=lambda found: ((found[1].step, found[1].save_id) in failed, found[1].step >= bad.first_step,
                                 -found[1].step))
    return [(target, manifest.to_json()) for target, manifest in good]


def _record(plan: Plan, checkpoints: Path, rollback: Rollback, screen: Screen) -> None:
    """Make the rollback durable, here and in the mirror. Raises SaveError."""
    with save_errors("the rollback cannot be recorded"):
        record_rollback(checkpoints, rollback)
    if plan.args.checkpoint_mirror is not None:
        try:
            withdraw(plan.args.checkpoint_mirror, rollback.abandoned)
        except ConfigError as error:
            screen.line(f"warning: the mirror still has the abandoned checkpoints: {error}")


def _report(plan: Plan, rollback: Rollback, folder: RunFolder, screen: Screen, *, number: int) -> None:
    skipped = [plan.read_order.end_of(position) for position in (rollback.first_sample, rollback.consumed_samples)]
    folder.event("rollback", step=rollback.last_step, reason=rollback.reason, number=number, to_step=rollback.to_step,
                 skipped_samples=skipped, abandoned=sorted(rollback.abandoned))
    screen.line(f"rollback {number} of at most {plan.args.max_rollbacks}, because of {rollback.reason}: back to step "
                f"{rollback.to_step}; samples {skipped[0]} to {skipped[1] - 1} are skipped")
    if rollback.abandoned:
        screen.line(f"moved later checkpoints to {Path(plan.args.save) / 'checkpoints' / f'{ABANDONED}{number}'}: "
                    f"{', '.join(rollback.abandoned)}")
