"""A run on fewer hosts than before: the flags that keep its global batch size, and the flags that choose hosts."""

import socket
from collections.abc import Iterable, Mapping
from typing import Any

from pretrain.data.token_schedules import recorded_batch_sizes
from pretrain.errors import ConfigError

HOST_FILTERS = ("include", "exclude", "num_nodes", "num_gpus", "exclude_stragglers")


def batch_flags(ranks: int, previous: Mapping[str, Any], flag: str = "--exclude_stragglers") -> list[str]:
    """Return the flags of train.py with which `ranks` ranks keep the global batch size of `previous`.

    Raises ConfigError if the global batch cannot be divided.

    Args:
        ranks: of the next start.
        previous: record of run.json.
        flag: the one that lets a run continue on fewer hosts.
    """
    return [f"--gradient_accumulation_steps={_accumulation_steps(ranks, previous, flag)}",
            f"--global_batch_size={previous['batch']['global_batch_size']}"]


def check_batch(hosts: Mapping[str, int], previous: Mapping[str, Any]) -> None:
    """Raise ConfigError if the global batch of `previous` cannot be divided among the ranks of these hosts."""
    batch_flags(sum(hosts.values()), previous)


def _accumulation_steps(ranks: int, previous: Mapping[str, Any], flag: str) -> int:
    layout, batch = previous["layout"], previous["batch"]
    micro_batch, global_batch = batch["micro_batch_size"], batch["global_batch_size"]
    ranks_per_model = layout["world_size"] // layout["data_parallel_size"]
    samples_per_accumulation_step = micro_batch * (ranks // ranks_per_model)
    undivided = [size for _, size in recorded_batch_sizes(previous).stages
                 if ranks < ranks_per_model or ranks % ranks_per_model or size % samples_per_accumulation_step]
    if undivided:
        raise ConfigError(
            flag, problem=f"the {ranks} remaining ranks cannot divide the global batch of {undivided[0]}, "
            f"with {ranks_per_model} ranks per model and a micro batch of {micro_batch}",
            remedy=f"choose slots and a global batch that also work with fewer hosts, or leave {flag} out")
    return int(global_batch // samples_per_accumulation_step)


def is_one_of(host: str, hosts: Iterable[str]) -> bool:
    """Return whether `host` has the address of one of the hosts; False for ""."""
    return bool(host) and _address(host) in {_address(other) for other in hosts}


def _address(host: str) -> str:
    """Return the IP address of the host, or its name if that does not resolve."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host
