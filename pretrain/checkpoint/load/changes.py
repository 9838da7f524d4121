"""Compare the settings of a run with those of the checkpoint that it continues from. Imports no torch."""

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.run_manifest import recipe_of, scheduler_source
from pretrain.config.flags.overrides import RECIPE_FLAGS, Change
from pretrain.config.model_of_run import DROPOUTS, initialization_of
from pretrain.config.validate import Plan
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.model.init_methods import Initialization

# parameter of an optimizer -> the name that allows another value
_OPTIMIZER_OVERRIDES = {"lr": "lr", "muon_lr": "lr", "adam_lr": "lr", "weight_decay": "weight_decay",
                        "betas": "betas", "momentum": "betas", "eps": "eps"}
_SAME_UPDATE = ("torch_adam", "fused", "foreach")  # another implementation of the same formula


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
