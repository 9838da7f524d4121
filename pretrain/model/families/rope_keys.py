"""Read the keys of rotary positions: rope_theta, rope_scaling, rope_parameters and their older names."""

import json
import math
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.families.family import Values
from pretrain.model.families.read import listing

_LARGEST_THETA = 1e12


def read_rope(values: Values, where: str, *, theta_key: str, fraction_key: str | None,
              head_size: int) -> dict[str, Any]:
    """Return the rotary fields, from the older keys (rope_theta, rope_scaling, rotary_pct ...) or `rope_parameters`."""
    if values["rope_scaling"] and values["rope_parameters"]:
        raise ConfigError(f"{where}: rope_scaling", problem="the config also has rope_parameters",
                          remedy="keep one of them")
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    nested = dict(values[key] or {})
    for name, value in nested.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in ("type", "rope_type") and not isinstance(value, str):
            raise ConfigError(f"{where}: {key}.{name}", found=json.dumps(value), expected='a string such as "linear"')
        if name in ("rope_theta", "partial_rotary_factor") and value is not None and not number:
            raise ConfigError(f"{where}: {key}.{name}", found=json.dumps(value), expected="a number")
    names = {name: f"{key}.{name}" for name in ("rope_theta", "partial_rotary_factor") if nested.get(name) is not None}
    theta = nested.pop("rope_theta", None)
    if theta is None:
        theta = 10000.0 if values[theta_key] is None else values[theta_key]
    fraction = nested.pop("partial_rotary_factor", None)
    if fraction is None:
        fraction = values[fraction_key] if fraction_key else 1.0
    if fraction_key is None and fraction != 1.0:
        raise ConfigError(f"{where}: {key}.partial_rotary_factor", found=fraction, expected="1.0 for this architecture")
    if not 0 < theta <= _LARGEST_THETA:
        raise ConfigError(f"{where}: {names.get('rope_theta', theta_key)}", found=theta,
                          expected=f"a number above 0, up to {_LARGEST_THETA:g}")
    if not 0 < fraction <= 1:
        raise ConfigError(f"{where}: {names.get('partial_rotary_factor', fraction_key)}", found=fraction,
                          expected="a fraction above 0, up to 1")
    for name, resolved in (("rope_theta", theta), ("partial_rotary_factor", fraction)):  # gpt_neox may have both
        if values.get(name) is not None and name != theta_key and values[name] != resolved:
            raise ConfigError(f"{where}: {name}", found=values[name],
                              expected=f"{resolved}, as in the other rotary keys of this file")
    scaling = _rope_scaling(nested, f"{where}: {key}", values["max_position_embeddings"])
    return {"rope_theta": float(theta), "rotary_size": int(head_size * fraction), "rope_scaling": scaling}


def _rope_scaling(nested: dict[str, Any], where: str, max_positions: int) -> dict[str, Any] | None:
    """Return the checked scaling of rotary positions; None without scaling."""
    nested = dict(nested)
    old_key = nested.pop("type", "default")
    kind = nested.pop("rope_type", old_key)
    wanted = {"default": [], "linear": ["factor"],
              "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
    if kind not in wanted:
        raise ConfigError(f"{where}.rope_type", found=repr(kind), expected=f"one of {listing(wanted)}")
    if kind == "llama3":
        nested.setdefault("original_max_position_embeddings", max_positions)
    for name in sorted(set(nested) ^ set(wanted[kind])):
        problem = "this is not a known key" if name in nested else "it is missing"
        raise ConfigError(f"{where}.{shorten(name)}", problem=problem,
                          remedy=f"{kind} has the keys {listing(wanted[kind]) or 'rope_type'}")
    for name, value in nested.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{where}.{name}", found=json.dumps(value), expected="a number above 0")
    if kind == "llama3" and nested["high_freq_factor"] <= nested["low_freq_factor"]:
        raise ConfigError(f"{where}.high_freq_factor", found=nested["high_freq_factor"],
                          expected=f"more than low_freq_factor ({nested['low_freq_factor']})")
    return None if kind == "default" else {"rope_type": kind, **nested}
