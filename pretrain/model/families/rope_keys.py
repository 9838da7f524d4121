"""Read the keys of rotary positions: rope_theta, rope_scaling, rope_parameters and their older names."""

import json
import math
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.families.family import Values
from pretrain.model.families.read import listing

_LARGEST_THETA = 1e12
# keys of each scaling type
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
# Keys that may be null if rope_parameters has the value, under the second name.
PREFERABLY_NESTED = {"rope_theta": "rope_theta", "rope_local_base_freq": "rope_theta", "rotary_emb_base": "rope_theta",
                     "rotary_pct": "partial_rotary_factor"}


def read_rope(values: Values, where: str, *, theta_key: str, fraction_key: str | None,
              head_size: int, default_fraction: float = 1.0) -> dict[str, Any]:
    """Return the rotary fields, from the older keys (rope_theta, rope_scaling, rotary_pct ...) or `rope_parameters`.

    Args:
        fraction_key: older key of the fraction of a head that rotates; None: all of it rotates.
        default_fraction: this fraction if the config has none.
    """
    if values["rope_scaling"] and values["rope_parameters"]:
        raise ConfigError(f"{where}: rope_scaling", problem="the config also has rope_parameters",
                          remedy="keep one of them")
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    nested = dict(values[key] or {})
    _check_types(nested, f"{where}: {key}")
    names = {name: f"{key}.{name}" for name in ("rope_theta", "partial_rotary_factor") if nested.get(name) is not None}
    for name in (theta_key, fraction_key):
        if name in PREFERABLY_NESTED and values[name] is None and PREFERABLY_NESTED[name] not in names:
            raise ConfigError(f"{where}: {name}", found="null", expected="a number",
                              remedy=f"null is possible only if rope_parameters has {PREFERABLY_NESTED[name]}")
    theta = _first_given(nested.pop("rope_theta", None), values[theta_key], 10000.0)
    fraction = _first_given(nested.pop("partial_rotary_factor", None), values[fraction_key] if fraction_key else None,
                            default_fraction)
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
            own = theta_key if name == "rope_theta" else fraction_key
            source = names.get(name, f"{own} or its default")
            raise ConfigError(f"{where}: {name}", found=values[name], expected=resolved,
                              remedy=f"for this architecture transformers ignores {name} and reads {source}; write the "
                              f"value there, or remove {name}")
    scaling = _rope_scaling(nested, f"{where}: {key}", values["max_position_embeddings"])
    rope = {"rope_theta": float(theta), "rotary_size": int(head_size * fraction), "rope_scaling": scaling}
    _check_frequencies(rope, f"{where}: {key}")
    return rope


def _check_types(nested: dict[str, Any], where: str) -> None:
    """Raise ConfigError for values of the wrong type, except for the factors of a scaling."""
    for name, value in nested.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in ("type", "rope_type") and not isinstance(value, str):
            raise ConfigError(f"{where}.{name}", found=json.dumps(value), expected='a string such as "linear"')
        if name in ("rope_theta", "partial_rotary_factor") and value is not None and not number:
            raise ConfigError(f"{where}.{name}", found=json.dumps(value), expected="a number")


def _first_given(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _rope_scaling(nested: dict[str, Any], where: str, max_positions: int) -> dict[str, Any] | None:
    """Return the checked scaling of rotary positions; None without scaling."""
    nested = dict(nested)
    old_key = nested.pop("type", "default")
    kind = nested.pop("rope_type", old_key)
    if kind not in _REQUIRED:
        raise ConfigError(f"{where}.rope_type", found=repr(kind), expected=f"one of {listing(_REQUIRED)}")
    optional = _YARN_OPTIONAL if kind == "yarn" else ()
    nested = {name: value for name, value in nested.items() if value is not None or name not in optional}
    if "original_max_position_embeddings" in _REQUIRED[kind]:
        nested.setdefault("original_max_position_embeddings", max_positions)
    for name in sorted((set(nested) - {*optional}) ^ {*_REQUIRED[kind]}):
        problem = "this is not a known key" if name in nested else "it is missing"
        names = listing((*_REQUIRED[kind], *optional))
        raise ConfigError(f"{where}.{shorten(name)}", problem=problem,
                          remedy=f"{kind} has the keys {names or 'rope_type'}")
    _check_scaling_values(nested, where)
    return None if kind == "default" else {"rope_type": kind, **nested}


def _check_scaling_values(nested: dict[str, Any], where: str) -> None:
    """Raise ConfigError for values of a scaling that have the wrong type, are not positive, or are contradictory."""
    for name, value in nested.items():
        if name == "truncate":
            if not isinstance(value, bool):
                raise ConfigError(f"{where}.truncate", found=json.dumps(value), expected="true or false")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{where}.{name}", found=json.dumps(value), expected="a number above 0")
    complete = {"beta_fast": 32, "beta_slow": 1, **nested}
    for larger, smaller in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
        if larger in complete and complete[larger] <= complete[smaller]:
            given = larger if larger in nested else smaller
            raise ConfigError(f"{where}.{given}", found=complete[given],
                              expected=f"{larger} ({complete[larger]}) more than {smaller} ({complete[smaller]})")


def _check_frequencies(rope: dict[str, Any], where: str) -> None:
    """Raise ConfigError if the formula of the scaling type (rope.py) would divide by 0."""
    kind = (rope["rope_scaling"] or {}).get("rope_type")
    if kind == "dynamic" and rope["rotary_size"] < 4:  # the exponent is size / (size - 2)
        raise ConfigError(f"{where}.rope_type", problem="dynamic needs at least 4 rotary elements a head",
                          remedy=f"this model has {rope['rotary_size']}")
    if kind == "yarn" and rope["rope_theta"] <= 1:  # divisor: the logarithm of rope_theta
        raise ConfigError(f"{where}.rope_type", problem="yarn needs a rope_theta above 1",
                          remedy=f"this model has {rope['rope_theta']:g}")
