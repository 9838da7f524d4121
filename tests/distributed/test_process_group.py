"""Time-outs of the process group, and the addresses on which its ranks listen."""

import json
from pathlib import Path

import pytest

from pretrain.distributed.process_group import collective_timeout_s
from pretrain.errors import ConfigError
from tests.support.launch import run_ranks

_LISTENING = """
import json, psutil, torch
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
init_process_group(running_environment())
value = torch.ones(1)
torch.distributed.all_reduce(value)
sockets = psutil.Process().net_connections(kind="inet")
print(json.dumps([value.item(), [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]]))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_ranks_of_one_host_listen_on_the_loopback_address_only(tmp_path: Path) -> None:
    program = tmp_path / "listening.py"
    program.write_text(_LISTENING)
    for rank in run_ranks([str(program)], 2, cwd=tmp_path):
        assert rank.returncode == 0, rank.stdout
        value, addresses = json.loads(rank.stdout.splitlines()[-1])
        assert value == 2
        assert {*addresses} == {"127.0.0.1"}, rank.stdout  # the store on rank 0, gloo on both


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
