"""Recognize an optimizer of torch or DeepSpeed by the states and settings that a checkpoint has of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.errors import ConfigError
from pretrain.extensions.adopt.foreign_run import Omission

_SETTINGS = ("betas", "eps", "momentum", "dampening", "nesterov", "lr_decay")  # of a DeepSpeed JSON, besides "lr"
# older versions of torch do not record it for Adam and AdamW, and no checkpoint has the optimizer's class
UNKNOWN_DECAY = Omission("weight_decay", "the checkpoint does not record whether weight decay is decoupled from the "
                     "gradient; it is taken as decoupled (AdamW)")


@dataclass(frozen=True)
class Recognized:
    """An optimizer that this program has, too."""

    type: str  # of a DeepSpeed JSON
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
