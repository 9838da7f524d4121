"""Compare the settings of a run with the settings of the checkpoint that it continues from. Imports no torch.

The learning-rate schedule remains as at the run's first start, unless --override schedule plans it again.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    recipe_of,
    schedule_record,
    schedule_values,
    scheduler_source,
)
from pretrain.config.flags.check_flags import RECIPE_FLAGS, Change
from pretrain.config.make_schedule import default_warmup_steps, make_schedule
from pretrain.config.model_of_run import DROPOUTS, initialization_of
from pretrain.config.plan import Plan, RunLength
from pretrain.config.schedule import FIELD_OF_FLAG, KINDS, phases_text, schedule_from_json
from pretrain.data.samples.read_order import recorded_read_order
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.model.init_methods import Initialization

# parameter of an optimizer -> the name that allows another value
_OPTIMIZER_OVERRIDES = {"lr": "lr", "muon_lr": "lr", "adam_lr": "lr", "weight_decay": "weight_decay",
                        "betas": "betas", "momentum": "betas", "eps": "eps"}
_SAME_UPDATE = ("torch_adam", "fused", "foreach")  # another implementation of the same formula
_SAME_RATE = 1e-4  # relative difference
_RATES = ("warmup_max_lr", "warmup_min_lr")  # rates of the JSON's scheduler: "auto" takes them from the optimizer's lr


def changes_of(manifest: Manifest, plan: Plan, folder: Path, named: frozenset[str]) -> list[Change]:
    """Return the settings that differ from the checkpoint's, apart from layout, data and schedule.

    Raises ConfigError for the first one that no name in `named` allows. A larger or smaller global batch needs a name
    only if the run's length is in tokens: its number of steps changes.
    """
    changes = [change for field, change in _differences(manifest, plan, folder) if field not in manifest.unknown]
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


def _differences(manifest: Manifest, plan: Plan, folder: Path) -> Iterator[tuple[str, Change]]:
    """Yield the field of the manifest, and the change."""
    layout = plan.layout
    # --seq_length determines the order of the samples: after a change, samples would be repeated or skipped. With
    # another --document_attention the same weights compute something else. A scheduler cannot load the state of another
    # scheduler.
    groups = {
        "optimizer": _optimizer(manifest, plan),
        "no_weight_decay": _pairs("weight_decay", {"--no_weight_decay": (
            manifest.no_weight_decay, sorted({*(plan.args.no_weight_decay or ())}))}),
        "seed": _pairs("seed", {"--seed": (manifest.seed, plan.args.seed)}),
        "seq_length": _pairs("", {"--seq_length": (manifest.seq_length, layout.seq_length)}),
        "document_attention": _pairs("", {"--document_attention": (manifest.document_attention,
                                                                   layout.document_attention)}),
        "scheduler": _pairs("", {"scheduler of": (manifest.scheduler, scheduler_source(plan))}),
        "model": _model(manifest, plan, folder),
        "global_batch_size": _pairs("batch", {"global batch size": (manifest.global_batch_size,
                                                                    layout.global_batch_size)}),
        "recipe": _recipe(manifest, plan)}
    yield from ((field, change) for field, changes in groups.items() for change in changes)


def _pairs(name: str, pairs: dict[str, tuple[Any, Any]]) -> Iterator[Change]:
    for setting, (before, now) in pairs.items():
        if before != now:
            yield Change(name, setting, before, now)


def _optimizer(manifest: Manifest, plan: Plan) -> Iterator[Change]:
    saved, current = manifest.optimizer, plan.ds_config["optimizer"]
    yield from _pairs("", {"optimizer type": (saved.get("type"), current.get("type"))})
    params = [{name: value for name, value in (optimizer.get("params") or {}).items() if name not in _SAME_UPDATE}
              for optimizer in (saved, current)]
    for name in dict.fromkeys((*params[0], *(params[1] if manifest.adopted is None else ()))):
        yield from _pairs(_OPTIMIZER_OVERRIDES.get(name, ""),
                          {f"optimizer {name}": (params[0].get(name), params[1].get(name))})


def _model(manifest: Manifest, plan: Plan, folder: Path) -> Iterator[Change]:
    saved = replace(model_config_from(manifest.model, f"{folder / MANIFEST}: model"), **manifest.dropouts)
    theirs, own = (config.implementation.settings(config) for config in (saved, plan.model))
    yield from _pairs("", {f"model {key}": (theirs.get(key), own.get(key)) for key in sorted({*theirs, *own})})
    for f in fields(saved):
        if f.name not in ("hf_config", "implementation"):
            yield from _pairs("dropout" if f.name in DROPOUTS else "",
                              {f"model {f.name}": (getattr(saved, f.name), getattr(plan.model, f.name))})
    initial, current = Initialization(**manifest.initialization), initialization_of(plan.args)
    yield from _pairs("", {f"--{name}": (value, getattr(current, name)) for name, value in asdict(initial).items()})


def _recipe(manifest: Manifest, plan: Plan) -> Iterator[Change]:
    """Yield changes of clipping and of the flags in RECIPE_FLAGS. An adopted run may not record all of them."""
    current = recipe_of(plan)
    if "gradient_clipping" in manifest.recipe:
        # 0 and a missing key: no clipping
        yield from _pairs("clipping", {"gradient_clipping": (manifest.recipe["gradient_clipping"] or None,
                                                             current["gradient_clipping"] or None)})
    is_same_order = recorded_read_order(manifest.recipe) == plan.read_order
    for flag, name in RECIPE_FLAGS.items():
        if name == "samples" and is_same_order:  # however its flags write it
            continue
        default = getattr(type(plan.args), flag, None)  # the value of a flag that the checkpoint does not record
        yield from _pairs(name, {f"--{flag}": (manifest.recipe.get(flag, default), current[flag])})


@dataclass(frozen=True)
class ContinuedSchedule:
    """The learning-rate schedule with which a run continues."""

    values: dict[str, Any]  # as in a manifest: `run_manifest.schedule_record`
    flags: dict[str, Any]  # flags or JSON keys that planned it
    note: str = ""  # how it differs from the schedule that the flags alone would plan
    changes: tuple[Change, ...] = ()  # by --override schedule

    def of_plan(self, plan: Plan) -> dict[str, Any]:
        """Return the fields of the plan that this schedule sets."""
        if plan.schedule is None:
            return {"ds_config": {**plan.ds_config, "scheduler": self.values}, "schedule_flags": self.flags}
        return {"schedule": schedule_from_json(self.values), "schedule_flags": self.flags}


def continued_schedule(plan: Plan, length: RunLength, manifest: Manifest, folder: Path,
                       named: frozenset[str]) -> ContinuedSchedule:
    """Return the schedule to continue with in a run of this length.

    This is the schedule of the checkpoint, with the peak rate of this run, unless --override schedule is given. Raises
    ConfigError if the flags ask for another schedule.
    """
    saved, planned = manifest.schedule, _planned_schedule(plan, length, named)
    as_planned = ContinuedSchedule(planned, plan.schedule_flags)
    if manifest.adopted is not None:
        return replace(as_planned, note=_rate_note(plan, manifest))
    if saved is None:
        if "schedule" in named:
            return as_planned
        return replace(as_planned, note=f"{folder.name} does not record its learning-rate schedule: it continues with "
                       f"that of the flags, {_text(planned)}")
    kept = _at_this_rate(saved, planned, plan)
    if kept == planned:
        return as_planned
    if "schedule" in named:
        return replace(as_planned, changes=(Change("schedule", "learning-rate schedule", _text(kept), _text(planned)),))
    _reject_other_flags(plan, manifest, kept, planned, folder)
    note = f"the learning-rate schedule remains that of the run's first start: {_text(kept)}"
    if length.train_steps > (end := _end(kept, length.train_steps)):
        note += f"; the steps after {end} train at the lowest rate"
    note += f". --override schedule plans it again, for {length.train_steps} steps: {_text(planned)}"
    return ContinuedSchedule(kept, manifest.schedule_flags, note)


def _rate_note(plan: Plan, manifest: Manifest) -> str:
    """Return a note if an adopted run recorded another learning rate than this run's schedule has at its step."""
    assert manifest.adopted is not None
    upcoming, recorded = manifest.adopted.get("next_rate"), manifest.adopted.get("learning_rate")
    if plan.schedule is None or (upcoming is None and recorded is None):
        return ""
    applied = manifest.step - manifest.adopted.get("skipped_steps", 0)
    last, following = plan.schedule(max(applied - 1, 0)), plan.schedule(applied)
    # some programs record the next step's rate as the last one's
    wanted, rates = (upcoming, [following]) if upcoming is not None else (recorded or 0.0, [last, following])
    if any(abs(rate - wanted) <= _SAME_RATE * max(rate, wanted) for rate in rates):
        return ""
    return f"{manifest.adopted.get('program')} recorded the learning rate {wanted:.4g} at step {manifest.step}; this " \
           f"schedule continues with {following:.4g}: {_text(schedule_record(plan))}"


def _planned_schedule(plan: Plan, length: RunLength, named: frozenset[str]) -> dict[str, Any]:
    """Return the schedule that the flags or the JSON plan for a length.

    Raises ConfigError if --override schedule asks for a schedule that does not fit the length.
    """
    planned = schedule_record(plan)
    if length == plan.length:
        return planned
    if plan.schedule is None:
        params = planned.get("params", {})
        lengths = {"total_num_steps": length.train_steps, "warmup_num_steps": default_warmup_steps(length.train_steps)}
        given = {*plan.schedule_flags} | (set() if plan.args.lr_warmup_steps is None else {"warmup_num_steps"})
        automatic = {name: steps for name, steps in lengths.items() if name in params and name not in given}
        return {**planned, "params": {**params, **automatic}}
    try:
        return schedule_values(make_schedule(plan.args, peak=plan.schedule.peak, length=length))
    except ConfigError:
        if "schedule" in named:
            raise
        return planned  # the schedule of the checkpoint remains


def _at_this_rate(saved: dict[str, Any], planned: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the saved schedule with this run's peak rate. --min_lr remains the lowest rate."""
    if plan.schedule is None:
        rates = {name: planned["params"][name] for name in _RATES
                 if name in planned.get("params", {}) and name not in plan.schedule_flags}
        return {**saved, "params": {**saved.get("params", {}), **rates}}
    own = {"peak": planned["peak"]}
    if saved.get("peak") != planned["peak"] and "min_lr" in plan.schedule_flags:
        own["min_ratio"] = planned["min_ratio"]
    return schedule_values(schedule_from_json({**saved, **own}))  # it has the fields of later versions


def _reject_other_flags(plan: Plan, manifest: Manifest, kept: dict[str, Any], planned: dict[str, Any],
                        folder: Path) -> None:
    """Raise ConfigError if a flag that differs from the first start asks for another schedule."""
    from_json = plan.schedule is None
    values = [schedule.get("params", {}) if from_json else schedule for schedule in (kept, planned)]
    for name, wanted in plan.schedule_flags.items():
        field = name if from_json else FIELD_OF_FLAG.get(name)
        if field is None or manifest.schedule_flags.get(name) == wanted:
            continue
        before, now = (schedule.get(field) for schedule in values)
        if before != now:
            raise ConfigError(f"{'scheduler.params.' if from_json else '--'}{name}", problem=f"{wanted} asks for "
                              f"another learning-rate schedule than that of {folder} ({field} {_plain(now)}, there "
                              f"{_plain(before)})", remedy="leave it out, or change the schedule by --override "
                              "schedule")


def _end(values: dict[str, Any], train_steps: int) -> int:
    """Return the first step with the lowest rate; the run's last step if the schedule has no such step."""
    if "kind" not in values:  # the block of the JSON
        return int(values.get("params", {}).get("total_num_steps") or train_steps)
    return int(values["decay_steps"]) if KINDS[values["kind"]].decays else train_steps


def _text(values: dict[str, Any]) -> str:
    """Describe a schedule, such as `cosine, warm-up to 0.002 at step 20, lowest rate 0.0002 from step 30 on`."""
    if "kind" in values:
        return phases_text(schedule_from_json(values))
    params = ", ".join(f"{name} {_plain(value)}" for name, value in values.get("params", {}).items())
    return f"{values.get('type')} ({params})"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
