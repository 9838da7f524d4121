"""Recognize an optimizer of torch or DeepSpeed, and which parameters it decays, by what a checkpoint has of it.

This module imports no torch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pretrain.config.model_of_run import EMBEDDINGS
from pretrain.errors import ConfigError
from pretrain.extensions.adopt.foreign_run import Omission
from pretrain.model.init_methods import is_embedding

_SETTINGS = ("betas", "eps", "momentum", "dampening", "nesterov", "lr_decay")  # as in a DeepSpeed JSON, "lr" aside
# older versions of torch do not record it for Adam and AdamW, and no checkpoint has the optimizer's class
UNKNOWN_DECAY = Omission("weight_decay", "the checkpoint does not record whether weight decay is decoupled from the "
                     "gradient; it is taken as decoupled (AdamW)")
_LONGEST_LIST = 3  # names in a message


@dataclass(frozen=True)
class Recognized:
    """An optimizer that this program has, too."""

    type: str  # as in a DeepSpeed JSON
    states: tuple[str, ...]  # that it uses; others in the file are unused
    params: dict[str, Any]
    omissions: tuple[Omission, ...] = ()


def recognize(where: str, groups: Sequence[Mapping[str, Any]], states: Iterable[str],
              ds_config: Mapping[str, Any] | None) -> Recognized:
    """Return the optimizer of these parameter groups. Raises ConfigError if this program has none with these states.

    Args:
        where: for messages.
        groups: settings of the parameter groups.
        states: optimizer states that have a number for each weight; none before the first step.
        ds_config: the DeepSpeed JSON of the run, which may name the optimizer.
    """
    group, found = groups[0], set(states)
    in_json = (ds_config or {}).get("optimizer") or {}
    kind = str(in_json.get("type", "")).lower()
    if group.get("amsgrad") or group.get("use_muon") is not None or group.get("maximize"):
        raise _unknown(where, group, found)
    omissions: tuple[Omission, ...] = ()
    used: tuple[str, ...]
    if "betas" in group and "eps" not in group and kind in ("", "lion") and found <= {"exp_avg", "exp_avg_sq"}:
        name, used = "Lion", ("exp_avg",)  # DeepSpeedCPULion allocates exp_avg_sq, and never uses it
    elif "nesterov" in group and kind in ("", "sgd") and found <= {"momentum_buffer"}:
        name, used = "SGD", ("momentum_buffer",) if group["momentum"] else ()
    elif "betas" in group and kind in ("", "adam", "adamw") and _is_adam(group) and \
            found <= {"exp_avg", "exp_avg_sq"}:
        name, used = "AdamW", ("exp_avg", "exp_avg_sq")
        decoupled = _is_decoupled(group, kind, in_json.get("params") or {})
        if decoupled is None and any(each.get("weight_decay") for each in groups):
            omissions = (UNKNOWN_DECAY,)
        name = "Adam" if decoupled is False else name
    elif "lr_decay" in group and kind in ("", "adagrad") and found <= {"sum"}:
        name, used = "Adagrad", ("sum",)
    else:
        raise _unknown(where, group, found)
    params: dict[str, Any] = {"lr": float(group.get("initial_lr", group["lr"])),
                              **{key: group[key] for key in _SETTINGS if key in group},
                              "weight_decay": max(float(each.get("weight_decay", 0)) for each in groups)}
    if "betas" in params:
        params["betas"] = [float(beta) for beta in params["betas"]]
    if name == "Adam":
        params["adam_w_mode"] = False
    if group.get("bias_correction") is False:
        params["bias_correction"] = False
    return Recognized(name, used if found else (), params, (*omissions, *_several(groups)))


def _several(groups: Sequence[Mapping[str, Any]]) -> list[Omission]:
    """Return the omission of settings in which the parameter groups differ, apart from weight decay, if any."""
    own = [{**group, "lr": group.get("initial_lr", group.get("lr"))} for group in groups]
    found = {key: list(dict.fromkeys(str(group[key]) for group in own if group.get(key) is not None))
             for key in ("lr", *_SETTINGS)}
    texts = [f"{key} {' and '.join(values)}" for key, values in found.items() if len(values) > 1]
    return [Omission("other_states", f"the optimizer's parameter groups have {', '.join(texts)}; here all parameters "
                     "have those of the first group")] if texts else []


def _is_adam(group: Mapping[str, Any]) -> bool:
    """Return whether these are settings of Adam, and not of an optimizer with the same states (RAdam, NAdam, LAMB)."""
    return ("amsgrad" in group or "bias_correction" in group) and "max_coeff" not in group


def _is_decoupled(group: Mapping[str, Any], kind: str, params: Mapping[str, Any]) -> bool | None:
    """Return whether Adam's weight decay is that of AdamW; None: it is not recorded."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    if kind:
        return kind == "adamw" or bool(params.get("adam_w_mode", True))  # DeepSpeed's default
    return None


def _unknown(where: str, group: Mapping[str, Any], states: set[str]) -> ConfigError:
    return ConfigError(where, problem=f"its optimizer is not one that can be continued here: it has the states "
                       f"{', '.join(sorted(states)) or 'none'} and the settings {', '.join(sorted(map(str, group)))}",
                       remedy="Adam, AdamW, Lion, SGD and Adagrad of torch and DeepSpeed are read")


@dataclass(frozen=True)
class WeightDecay:
    """The weight decay of a run, in terms of --weight_decay, --decay_vectors and --no_weight_decay."""

    value: float | None = None  # value of the decayed parameters; None: not recorded
    decay_vectors: bool = False
    no_weight_decay: tuple[str, ...] = ()
    problem: str = ""  # why these flags do not describe it; then they are the defaults
    decays: Mapping[str, bool] = field(default_factory=dict)  # by our names: whether a parameter is decayed

    @property
    def flags(self) -> dict[str, bool | list[str]]:
        """The flags that are not at their defaults."""
        return {**({"decay_vectors": True} if self.decay_vectors else {}),
                **({"no_weight_decay": list(self.no_weight_decay)} if self.no_weight_decay else {})}


def weight_decay_of(found: Mapping[str, float], sources: Mapping[str, tuple[str, ...]],
                    is_matrix: Mapping[str, bool], default: float | None) -> WeightDecay:
    """Return the weight decay of a run.

    Args:
        found: weight decay of each of the source's parameters; empty: not recorded.
        sources: the source's parameters that hold each of ours, by our names.
        is_matrix: by our names.
        default: the optimizer's weight decay, if `found` is empty.
    """
    if not found:
        return WeightDecay(default, decays=is_matrix)
    values = {ours: {found[name] for name in names if name in found} for ours, names in sources.items()}
    mixed = sorted(ours for ours, decays in values.items() if len(decays) > 1)
    used = sorted({decay for decays in values.values() for decay in decays if decay != 0})
    if mixed or len(used) > 1:
        problem = f"the parts of {_listed(mixed)} have several" if mixed else \
            f"parameters have the weight decays {', '.join(f'{value:g}' for value in used[:_LONGEST_LIST])}"
        return WeightDecay(used[-1] if used else 0.0, problem=problem, decays=is_matrix)
    if not used:
        return WeightDecay(0.0, decays=is_matrix)
    decay_vectors = any(used[0] in values[ours] for ours in values if not is_matrix[ours])
    # parameters that were not trained have no recorded value, and get the usual one
    decays = {ours: values[ours] != {0.0} if values[ours] else is_matrix[ours] or decay_vectors for ours in values}
    without = [ours for ours, decayed in decays.items() if not decayed and (is_matrix[ours] or decay_vectors)]
    return WeightDecay(used[0], decay_vectors, _patterns(without, decays), decays=decays)


def _patterns(names: Iterable[str], all_names: Iterable[str]) -> tuple[str, ...]:
    """Return values of --no_weight_decay that match these parameters and no others."""
    wanted, known, patterns = set(names), list(all_names), []
    embeddings = {name for name in known if is_embedding(name)}
    if embeddings and embeddings <= wanted:
        patterns.append(EMBEDDINGS)
        wanted -= embeddings
    for pattern in dict.fromkeys(re.sub(r"^\d+\.", "*.", name) for name in sorted(wanted)):
        matched = {name for name in known if fnmatchcase(name, pattern)}
        patterns += [pattern] if matched <= wanted | embeddings & set(names) else \
            sorted(name for name in wanted if fnmatchcase(name, pattern))
    return tuple(sorted(patterns))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LONGEST_LIST]) + (f" and {len(names) - _LONGEST_LIST} others"
                                               if len(names) > _LONGEST_LIST else "")
