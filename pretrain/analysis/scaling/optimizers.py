"""The optimizers of scipy, which only the fits of laws import."""

from collections.abc import Callable
from typing import Any

from pretrain.errors import ConfigError


def scipy_function(name: str) -> Callable[..., Any]:
    """Return a function of scipy.optimize. Raises ConfigError without scipy."""
    try:
        import scipy.optimize
    except ImportError:
        raise ConfigError("scipy", problem="the fit of a scaling law needs it, and it is not installed",
                          remedy="pip install 'ds-pretrain[ladder]'") from None
    function: Callable[..., Any] = getattr(scipy.optimize, name)
    return function
