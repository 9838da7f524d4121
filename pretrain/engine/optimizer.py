"""The optimizer's parameter groups and their settings, the learning rate, and AdamW with 8-bit states."""

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch.optim.lr_scheduler import LambdaLR

from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.plan import Plan
from pretrain.engine.attachments import attachments
from pretrain.model.init_methods import is_embedding

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# keys of a parameter group; "lr" follows from "initial_lr" and the schedule
_SETTINGS = ("initial_lr", "weight_decay", "eps")
_CYCLED = ("betas", "momentum")  # DeepSpeed's OneCycle changes them in each step
_ONE_CYCLE = ("onecycle", "1cycle")


def parameter_groups(parameters: NamedParameters, undecayed: Set[str] = frozenset(), *,
                     decay_vectors: bool = False) -> list[dict[str, Any]]:
    """Return two groups: matrices with the optimizer's weight decay, and vectors (norms, biases) without.

    Args:
        parameters: pairs of name and parameter.
        undecayed: names of parameters that belong to the second group.
        decay_vectors: vectors belong to the first group, too.
    """
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in parameters:
        has_decay = (decay_vectors or is_matrix(parameter)) and name not in undecayed
        (decayed if has_decay else others).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return groups if others or not decay_vectors else groups[:1]


def mup_parameter_groups(parameters: NamedParameters, *, learning_rate: float, multiplier: float,
                         undecayed: Set[str] = frozenset(), decay_vectors: bool = False) -> list[dict[str, Any]]:
    """Return the groups for muP: embeddings, vectors, all other matrices and, if there are any, undecayed ones of them.

    Embeddings and vectors have the base rate, other matrices the base rate divided by the multiplier (init_methods.py
    cites the paper). Undecayed embeddings are in the group of the vectors, and with --decay_vectors, vectors are in
    that of the embeddings. The logged rate belongs to the first group. Pipeline stages without an embedding drop the
    first group; their first group then has the same rate.

    Args:
        parameters: pairs of name and parameter.
        learning_rate: base rate.
        multiplier: width of the model divided by the base model's.
        undecayed: names of parameters without weight decay.
        decay_vectors: vectors have weight decay, too.
    """
    embeddings: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in parameters:
        if is_embedding(name) or not is_matrix(parameter):
            has_decay = (decay_vectors or is_matrix(parameter)) and name not in undecayed
            (embeddings if has_decay else vectors).append(parameter)
        else:
            (others if name in undecayed else decayed).append(parameter)
    groups = [{"params": embeddings, "lr": learning_rate},
              {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
              {"params": decayed, "lr": learning_rate / multiplier}]
    if others:
        groups.append({"params": others, "lr": learning_rate / multiplier, "weight_decay": 0.0})
    return groups


def is_matrix(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix. Under `zero.Init` its shape is a partition's; `ds_shape` is complete."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def group_settings(engine: DeepSpeedEngine, ds_config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of a new engine's parameter groups: this run's, with the multipliers of muP."""
    is_cycled = str(ds_config.get("scheduler", {}).get("type", "")).lower() in _ONE_CYCLE
    names = _SETTINGS if is_cycled else (*_SETTINGS, *_CYCLED)
    return [{name: group[name] for name in names if name in group} for group in _groups(engine)]


def restore_settings(engine: DeepSpeedEngine) -> None:
    """Set this run's settings again after a checkpoint was loaded, and the rates that the schedule has at its step.

    Loading replaces the settings by the checkpoint's. Where they are the same, this changes nothing.
    """
    for group, own in zip(_groups(engine), attachments(engine).group_settings, strict=True):
        group.update(own)
    scheduler = engine.lr_scheduler
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in _groups(engine)]
        rates = [base * rate(scheduler.last_epoch) for base, rate in
                 zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    elif scheduler is not None and scheduler.last_batch_iteration >= 0:  # a class of DeepSpeed's lr_schedules.py
        rates = scheduler.get_lr()
    else:
        return
    for group, rate in zip(_groups(engine), rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def _groups(engine: DeepSpeedEngine) -> list[dict[str, Any]]:
    optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer.param_groups


def peak_learning_rate(plan: Plan) -> float:
    """Return the peak learning rate of the run: the schedule's, or the rate of the JSON's optimizer."""
    if plan.schedule is not None:
        return plan.schedule.peak
    return float(plan.ds_config["optimizer"]["params"]["lr"])


def set_learning_rate(engine: DeepSpeedEngine, lr: float) -> None:
    """Set the rate of the next step, for measurements that do not follow the schedule.

    Parameter groups with other rates, such as with muP, keep their proportions.

    The engine's schedule sets the rates again after each step, so that this must be called before each step.
    """
    groups = engine.optimizer.param_groups
    initial = [group.get("initial_lr", group["lr"]) for group in groups]
    for group, own in zip(groups, initial, strict=True):
        group["lr"] = lr * (own / initial[0] if initial[0] > 0 else 1.0)


def made_here(plan: Plan) -> tuple[MakeOptimizer | None, dict[str, Any]]:
    """Return the function that makes AdamW of bitsandbytes or the user's optimizer, and the JSON without "optimizer".

    DeepSpeed's JSON does not offer them, but DeepSpeed accepts such a function (runtime/engine.py,
    _configure_optimizer). The first one needs CUDA; the tests use a stand-in for it. For all other optimizers, return
    None and the plan's JSON: DeepSpeed makes them.
    """
    own = OPTIMIZERS[plan.layout.optimizer].own
    if plan.layout.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        own = AdamW8bit
    if own is None:
        return None, plan.ds_config
    params = plan.ds_config["optimizer"]["params"]

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = own(groups, **params)
        return optimizer

    return make, {key: value for key, value in plan.ds_config.items() if key != "optimizer"}
