"""Read the keys of rotary positions (rope_theta, rope_scaling, rope_parameters and their older names) and of windows.

The attention window of each layer: sliding_window, and layer_types, which transformers 5 also writes.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.families.family import Values, listing

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


LARGEST_LAYERS, _LARGEST_WINDOW = 10**5, 2**31 - 1  # config.py rejects more layers


def read_windows(values: Values, where: str, *, enabled: bool = True,
                 slides: Callable[[int], bool] = lambda index: True) -> tuple[int, ...]:
    """Return the number of latest tokens that a query sees in each layer; 0: all tokens.

    Args:
        enabled: whether the config's sliding_window applies; if not, all layers see all tokens.
        slides: whether the layer of this index has a window, if the config has no layer_types.
    """
    window, layers = values["sliding_window"], values["num_hidden_layers"]
    if window is not None and not 0 < window <= _LARGEST_WINDOW:
        raise ConfigError(f"{where}: sliding_window", found=window,
                          expected=f"a number of tokens from 1 to {_LARGEST_WINDOW:,}")
    if not 0 < layers <= LARGEST_LAYERS:
        return ()
    if values.get("layer_types") is not None:
        chosen = _read_layer_types(values, where)
    else:
        chosen = [enabled and window is not None and slides(index) for index in range(layers)]
    if any(chosen) and (window is None or not enabled):
        remedy = "Set use_sliding_window to true" if window is not None else "Set sliding_window to a number of tokens"
        raise ConfigError(f"{where}: layer_types", problem='it has "sliding_attention", but no window applies',
                          remedy=remedy)
    return tuple(window if slide else 0 for slide in chosen) if any(chosen) else ()


def _read_layer_types(values: Values, where: str) -> list[bool]:
    """Return for each layer whether `layer_types` gives it a window."""
    types, layers = values["layer_types"], values["num_hidden_layers"]
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{where}: layer_types", found=json.dumps(name),
                              expected='"full_attention" or "sliding_attention" (nothing else is implemented)')
    if len(types) != layers:
        raise ConfigError(f"{where}: layer_types", found=f"a list of length {len(types)}",
                          expected=f"one entry for each of the {layers} layers",
                          remedy="Set layer_types to null for the family's own pattern")
    return [name == "sliding_attention" for name in types]
