"""Compare the settings of a run with those of the checkpoint that it continues from. Imports no torch.

The learning-rate schedule remains that of the run's first start, unless --override schedule plans it again.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_manifest import recipe_of, schedule_record, scheduler_source
from pretrain.config.flags.overrides import RECIPE_FLAGS, Change
from pretrain.config.make_schedule import default_warmup_steps, make_schedule
from pretrain.config.model_of_run import DROPOUTS, initialization_of
from pretrain.config.schedule import Schedule, schedule_from_json
from pretrain.config.validate import Plan
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.model.init_methods import Initialization

# parameter of an optimizer -> the name that allows another value
_OPTIMIZER_OVERRIDES = {"lr": "lr", "muon_lr": "lr", "adam_lr": "lr", "weight_decay": "weight_decay",
                        "betas": "betas", "momentum": "betas", "eps": "eps"}
_SAME_UPDATE = ("torch_adam", "fused", "foreach")  # another implementation of the same formula
# flag -> the field of Schedule that it sets; keys of the JSON's scheduler have their own names
_FIELDS = {
    "lr_schedule": "kind", "lr_warmup_steps": "warmup_steps", "lr_warmup_tokens": "warmup_steps",
    "lr_decay_steps": "decay_steps", "lr_decay_tokens": "decay_steps", "lr_wsd_steps": "wsd_steps",
    "lr_wsd_tokens": "wsd_steps", "lr_decay_shape": "decay_shape", "lr_milestones": "milestones",
    "lr_milestone_tokens": "milestones", "lr_milestone_factor": "milestone_factor", "min_lr_ratio": "min_ratio",
    "min_lr": "min_ratio",
}
_RATES = ("warmup_max_lr", "warmup_min_lr")  # of the JSON's scheduler: "auto" takes them from the optimizer's lr
_ENDS = ("cosine", "linear", "wsd", "one_cycle")  # schedules whose rate is the lowest from `decay_steps` on


def changes_of(manifest: Manifest, plan: Plan, folder: Path, named: frozenset[str]) -> list[Change]:
    """Return the settings that differ from those of the checkpoint, apart from layout, data and schedule.

    Raises ConfigError for the first one that no name in `named` allows. A larger or smaller global batch needs a name
    only if the run's length is in tokens: its number of steps changes.
    """
    changes = list(_differences(manifest, plan, folder))
    for change in changes:
        if change.name not in named and not (change.name == "batch" and change.setting == "global batch size"
                                             and plan.args.train_tokens is None):
            raise _rejection(change, folder)
    return changes


def _rejection(change: Change, folder: Path) -> ConfigError:
    remedy = f"use the saved value, or change it by --override {change.name}" if change.name else \
        f"a resume needs the same {change.setting.split()[0]}: use the saved value, or choose another --save"
    return ConfigError(f"{folder}: {change.setting}", remedy=remedy,
                       problem=f"{change.before} in the checkpoint and {change.now} in this run")


def _differences(manifest: Manifest, plan: Plan, folder: Path) -> Iterator[Change]:
    yield from _optimizer(manifest, plan)
    yield from _pairs("seed", {"--seed": (manifest.seed, plan.args.seed)})
    # --seq_length determines the order of the samples: after a change, samples would be repeated or skipped. With
    # another --document_attention the same weights compute something else.
    yield from _pairs("", {"--seq_length": (manifest.seq_length, plan.layout.seq_length),
                           "--document_attention": (manifest.document_attention, plan.layout.document_attention),
                           # a scheduler cannot load the state of another scheduler
                           "scheduler of": (manifest.scheduler, scheduler_source(plan))})
    yield from _model(manifest, plan, folder)
    yield from _pairs("batch", {"global batch size": (manifest.global_batch_size, plan.layout.global_batch_size)})
    yield from _recipe(manifest, plan)


def _pairs(name: str, pairs: dict[str, tuple[Any, Any]]) -> Iterator[Change]:
    for setting, (before, now) in pairs.items():
        if before != now:
            yield Change(name, setting, before, now)


def _optimizer(manifest: Manifest, plan: Plan) -> Iterator[Change]:
    saved, current = manifest.optimizer, plan.ds_config["optimizer"]
    yield from _pairs("", {"optimizer type": (saved.get("type"), current.get("type"))})
    params = [{name: value for name, value in (optimizer.get("params") or {}).items() if name not in _SAME_UPDATE}
              for optimizer in (saved, current)]
    for name in dict.fromkeys((*params[0], *params[1])):
        yield from _pairs(_OPTIMIZER_OVERRIDES.get(name, ""),
                          {f"optimizer {name}": (params[0].get(name), params[1].get(name))})
    yield from _pairs("weight_decay", {"--no_weight_decay": (manifest.no_weight_decay,
                                                             sorted({*(plan.args.no_weight_decay or ())}))})


def _model(manifest: Manifest, plan: Plan, folder: Path) -> Iterator[Change]:
    saved = replace(model_config_from(manifest.model, f"{folder / MANIFEST}: model"), **manifest.dropouts)
    for f in fields(saved):
        if f.name != "hf_config":
            yield from _pairs("dropout" if f.name in DROPOUTS else "",
                              {f"model {f.name}": (getattr(saved, f.name), getattr(plan.model, f.name))})
    initial, current = Initialization(**manifest.initialization), initialization_of(plan.args)
    yield from _pairs("", {f"--{name}": (value, getattr(current, name)) for name, value in asdict(initial).items()})


def _recipe(manifest: Manifest, plan: Plan) -> Iterator[Change]:
    """Yield changes of clipping and of the flags in RECIPE_FLAGS. Older manifests do not record all of them."""
    current = recipe_of(plan)
    if "gradient_clipping" in manifest.recipe:
        yield from _pairs("clipping", {"gradient_clipping": (manifest.recipe["gradient_clipping"],
                                                             current["gradient_clipping"])})
    for flag, name in RECIPE_FLAGS.items():
        default = getattr(type(plan.args), flag, None)  # of a flag that is newer than the checkpoint
        yield from _pairs(name, {f"--{flag}": (manifest.recipe.get(flag, default), current[flag])})


def keep_schedule(plan: Plan, manifest: Manifest, folder: Path, named: frozenset[str]) -> tuple[Plan, list[Change]]:
    """Return the plan with the schedule to continue with, and what --override schedule changes, if it is named.

    This is the schedule of the checkpoint, with the peak rate of this run, unless --override schedule is given. A note
    of the plan says what differs from the schedule that the flags alone would plan. Raises ConfigError if the flags
    ask for another schedule.
    """
    saved, planned = manifest.schedule, schedule_record(plan)
    if saved is None:
        if "schedule" in named:
            return plan, []
        return _with_note(plan, f"{folder.name} does not record its learning-rate schedule: it continues with that of "
                          f"the flags, {_text(plan, planned)}"), []
    kept = _at_this_rate(saved, planned, plan)
    if kept == planned:
        return plan, []
    if "schedule" in named:
        return plan, [Change("schedule", "learning-rate schedule", _text(plan, kept), _text(plan, planned))]
    _reject_other_flags(plan, manifest, kept, planned, folder)
    note = f"the learning-rate schedule remains that of the run's first start: {_text(plan, kept)}"
    if plan.train_steps > (end := _end(plan, kept)):
        note += f"; the steps after {end} train at the lowest rate"
    note += f". --override schedule plans it again, for {plan.train_steps} steps: {_text(plan, planned)}"
    return _with_note(_with_schedule(plan, kept, manifest), note), []


def schedule_for_length(plan: Plan) -> Plan:
    """Return the plan with the schedule that its flags or the JSON plan for its length. Raises ConfigError."""
    if plan.schedule is not None:
        return replace(plan, schedule=make_schedule(plan.args, peak=plan.schedule.peak, length=plan.length))
    scheduler = plan.ds_config["scheduler"]
    lengths = {"total_num_steps": plan.train_steps, "warmup_num_steps": default_warmup_steps(plan.train_steps)}
    params = scheduler.get("params", {})
    given = {*plan.schedule_flags} | (set() if plan.args.lr_warmup_steps is None else {"warmup_num_steps"})
    automatic = {name: steps for name, steps in lengths.items() if name in params and name not in given}
    return replace(plan, ds_config={**plan.ds_config, "scheduler": {**scheduler, "params": {**params, **automatic}}})


def _at_this_rate(saved: dict[str, Any], planned: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the saved schedule with this run's peak rate. --min_lr remains the lowest rate."""
    if plan.schedule is None:
        rates = {name: planned["params"][name] for name in _RATES
                 if name in planned.get("params", {}) and name not in plan.schedule_flags}
        return {**saved, "params": {**saved.get("params", {}), **rates}}
    own = {"peak": planned["peak"]}
    if saved.get("peak") != planned["peak"] and "min_lr" in plan.schedule_flags:
        own["min_ratio"] = planned["min_ratio"]
    known = asdict(schedule_from_json({**saved, **own}))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}


def _reject_other_flags(plan: Plan, manifest: Manifest, kept: dict[str, Any], planned: dict[str, Any],
                        folder: Path) -> None:
    """Raise ConfigError if a flag that is not that of the first start asks for another schedule."""
    from_json = plan.schedule is None
    values = [schedule.get("params", {}) if from_json else schedule for schedule in (kept, planned)]
    for name, wanted in plan.schedule_flags.items():
        field = name if from_json else _FIELDS.get(name)
        if field is None or manifest.schedule_flags.get(name) == wanted:
            continue
        before, now = (schedule.get(field) for schedule in values)
        if before != now:
            raise ConfigError(f"{'scheduler.params.' if from_json else '--'}{name}", problem=f"{wanted} asks for "
                              f"another learning-rate schedule than that of {folder} ({field} {_plain(now)}, there "
                              f"{_plain(before)})", remedy="leave it out, or change the schedule by --override "
                              "schedule")


def _with_schedule(plan: Plan, kept: dict[str, Any], manifest: Manifest) -> Plan:
    plan = replace(plan, schedule_flags=manifest.schedule_flags)
    if plan.schedule is None:
        return replace(plan, ds_config={**plan.ds_config, "scheduler": kept})
    return replace(plan, schedule=schedule_from_json(kept))


def _with_note(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))


def _end(plan: Plan, values: dict[str, Any]) -> int:
    """Return the first step with the lowest rate; the run's last step if the schedule has no such step."""
    if plan.schedule is None:
        return int(values.get("params", {}).get("total_num_steps") or plan.train_steps)
    return int(values["decay_steps"]) if values["kind"] in _ENDS else plan.train_steps


def _text(plan: Plan, values: dict[str, Any]) -> str:
    """Describe a schedule, such as `cosine, warm-up to 0.002 at step 20, lowest rate 0.0002 from step 30 on`."""
    if plan.schedule is None:
        params = ", ".join(f"{name} {_plain(value)}" for name, value in values.get("params", {}).items())
        return f"{values.get('type')} ({params})"
    schedule: Schedule = schedule_from_json(values)
    text = f"{schedule.kind}, warm-up to {schedule.peak:g} at step {schedule.warmup_steps}"
    if schedule.kind in _ENDS:
        text += f", lowest rate {schedule.peak * schedule.min_ratio:g} from step {schedule.decay_steps} on"
    if schedule.kind == "wsd":
        text += f", {schedule.decay_shape} decay in the last {schedule.wsd_steps} steps"
    return text


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
