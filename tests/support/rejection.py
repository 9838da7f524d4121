"""The message with which a call is rejected."""

from collections.abc import Callable
from typing import Any

import pytest

from pretrain.errors import ConfigError


def rejection(call: Callable[..., Any], *args: Any, **settings: Any) -> str:
    """Return the message of the ConfigError that a call raises: one line."""
    with pytest.raises(ConfigError) as error:
        call(*args, **settings)
    message = str(error.value)
    assert "\n" not in message, message
    return message
