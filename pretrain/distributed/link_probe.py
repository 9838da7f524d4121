"""Measure the links between ranks: how long a message of 256 KiB takes to another rank and back."""

import time

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

MESSAGE_BYTES = 256 * 1024
_REPETITIONS = 5
_LONGEST_S = 0.3  # of a pair after the first repetition, which may wait for the other rank


def rounds_of(ranks: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks that exchange messages at the same time. A rank is in one pair of a round at most.

    They are neighbours in a ring, and ranks that are half of the ring apart, which are mostly on different hosts.
    """
    neighbours = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    half = ranks // 2
    rounds = [neighbours[:ranks - 1:2], neighbours[1::2] if ranks > 2 else [],
              [(rank, rank + half) for rank in range(half)] if ranks > 3 else []]
    return [pairs for pairs in rounds if pairs]


def probe_links(device: torch.device) -> dict[tuple[int, int], float]:
    """Return the seconds of each pair of ranks: the shortest of some repetitions. Collective; waits for the device."""
    rank, rounds = dist.get_rank(), rounds_of(dist.get_world_size())
    own = torch.zeros(len(rounds), dtype=torch.float64, device=device)
    message = torch.zeros(MESSAGE_BYTES // 4, device=device)
    for number, pairs in enumerate(rounds):
        for first, second in pairs:
            if rank == first:
                own[number] = _send(message, second)
            elif rank == second:
                _return(message, first)
    everyone = own.new_empty(dist.get_world_size(), len(rounds))
    dist.all_gather(list(everyone.unbind(0)), own)
    seconds = everyone.cpu().numpy()
    return {(first, second): float(seconds[first, number])
            for number, pairs in enumerate(rounds) for first, second in pairs}


def _send(message: torch.Tensor, other: int) -> float:
    """Send messages to another rank, which returns them. The first value of the last one is 1."""
    seconds: list[float] = []
    while not message[0]:
        message[0] = len(seconds) == _REPETITIONS - 1 or sum(seconds[1:]) > _LONGEST_S
        get_accelerator().synchronize()
        start = time.perf_counter()
        dist.send(message, other)
        dist.recv(message, other)
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
    message.zero_()
    return float(np.min(seconds))


def _return(message: torch.Tensor, other: int) -> None:
    while not message[0]:
        dist.recv(message, other)
        dist.send(message, other)
    message.zero_()
