"""Time-outs of the process group."""

import pytest

from pretrain.distributed.process_group import collective_timeout_s
from pretrain.errors import ConfigError


@pytest.mark.parametrize(("longest_s", "minutes", "expected_s"), [
    (0, None, 1800),  # no watchdog
    (600, None, 1800),
    (7200, None, 7500),  # after the watchdog
    (7200, "1", 60),  # the user's choice
])
def test_collectives_time_out_after_the_watchdog(longest_s: float, minutes: str | None, expected_s: float) -> None:
    environ = {} if minutes is None else {"DEEPSPEED_TIMEOUT": minutes}
    assert collective_timeout_s(longest_s, environ) == expected_s
    assert environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == str(int(expected_s))


@pytest.mark.parametrize("minutes", ["", "0", "-1", "1.5", "ten", "9" * 30, "\u00b2"])
def test_a_wrong_time_out_is_rejected(minutes: str) -> None:
    with pytest.raises(ConfigError, match=r"^DEEPSPEED_TIMEOUT: found .*; expected a whole number of minutes from"):
        collective_timeout_s(600, {"DEEPSPEED_TIMEOUT": minutes})
