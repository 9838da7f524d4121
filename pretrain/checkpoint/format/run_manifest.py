"""The manifest of a checkpoint that a run writes: the values that come from its plan."""

import json
import math
from dataclasses import asdict
from typing import Any

from pretrain.checkpoint.format.manifest import LAYOUT_KEYS, Manifest
from pretrain.config.flags.overrides import RECIPE_FLAGS
from pretrain.config.model_of_run import DROPOUTS, initialization_of
from pretrain.config.plan import Plan
from pretrain.config.schedule import Schedule

SCHEDULED_BY_FLAGS = "the flags"  # value of `Manifest.scheduler` if flags set the learning-rate schedule


def manifest_of(plan: Plan, *, step: int, consumed_samples: int, versions: dict[str, str],
                eval_loss: float | None = None, loss_scale: dict[str, float] | None = None,
                recipe_states: dict[str, Any] | None = None, save_id: str = "") -> Manifest:
    """Return the manifest of a checkpoint that the run `plan` writes after `step` steps. Its `files` are empty."""
    layout = plan.layout
    return Manifest(
        **{name: getattr(layout, name) for name in LAYOUT_KEYS},
        step=step, consumed_samples=consumed_samples, data_parallel_size=layout.data_parallel_size,
        global_batch_size=layout.global_batch_size, optimizer=plan.ds_config["optimizer"], seed=plan.args.seed,
        model=plan.model.hf_config, data_fingerprint=plan.datasets["train"].fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(plan),
        versions=versions, eval_loss=eval_loss if eval_loss is not None and math.isfinite(eval_loss) else None,
        loss_scale=loss_scale, recipe_states=recipe_states or {}, initialization=asdict(initialization_of(plan.args)),
        no_weight_decay=sorted({*(plan.args.no_weight_decay or ())}),
        dropouts={name: getattr(plan.model, name) for name in DROPOUTS}, scheduler=scheduler_source(plan),
        document_attention=layout.document_attention, save_id=save_id,
        origin=asdict(plan.origin) if plan.origin else None, data=plan.datasets["train"].record(),
        schedule=schedule_record(plan), schedule_flags=plan.schedule_flags, recipe=recipe_of(plan),
        overrides=list(plan.overrides), lineage=list(plan.lineage))


def tokenizer_fingerprint(plan: Plan) -> str | None:
    """Return the fingerprint of the run's tokenizer; None for a run without --tokenizer."""
    return plan.tokenizer.fingerprint if plan.tokenizer else None


def schedule_record(plan: Plan) -> dict[str, Any]:
    """Return the learning-rate schedule as JSON values: fields of Schedule, or the JSON's "scheduler" block."""
    if plan.schedule is not None:
        return schedule_values(plan.schedule)
    block: dict[str, Any] = json.loads(json.dumps(plan.ds_config.get("scheduler", {})))
    return block


def schedule_values(schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a schedule as JSON values."""
    return {**asdict(schedule), "milestones": list(schedule.milestones)}


def recipe_of(plan: Plan) -> dict[str, Any]:
    """Return gradient clipping and the values of the flags in RECIPE_FLAGS."""
    return {"gradient_clipping": plan.ds_config.get("gradient_clipping"),
            **{name: getattr(plan.args, name, None) for name in RECIPE_FLAGS}}


def scheduler_source(plan: Plan) -> str:
    """Return the source of the learning rate: the type of the JSON's scheduler, or SCHEDULED_BY_FLAGS."""
    return str(plan.ds_config.get("scheduler", {}).get("type", "")) if plan.schedule is None else \
        SCHEDULED_BY_FLAGS
