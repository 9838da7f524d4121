"""Read the attention window of each layer: sliding_window, and layer_types, which transformers 5 also writes."""

import json
from collections.abc import Callable

from pretrain.errors import ConfigError
from pretrain.model.families.family import Values

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
