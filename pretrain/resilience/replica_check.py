"""Compare copies of the parameters: those of data-parallel ranks, and tied ones of pipeline stages."""

import socket
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.config.validate import Plan
from pretrain.distributed.collectives import gather
from pretrain.engine.replicas import checksum, replicated_tensors
from pretrain.errors import CorruptionError
from pretrain.monitor.write_run_folder import RunFolder

_MOST_RANKS_NAMED = 8


class ReplicaCheck:
    """Compares checksums of the parameters between the ranks that hold copies of them.

    A check reads each copy once on its device, reduces two integers per parameter in each group of ranks, and reads one
    number on the host.
    """

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, folder: RunFolder) -> None:
        self._interval, self._engine, self._folder = plan.args.replica_check_interval, engine, folder
        self._checked_step = -1

    def check(self, step: int, *, force: bool = False) -> None:
        """Compare the copies every --replica_check_interval steps, or now with `force`; collective.

        Raises CorruptionError, which names the rank, on all ranks.
        """
        if self._interval == 0 or step == self._checked_step or not (force or step % self._interval == 0):
            return
        self._checked_step = step
        differing = compare_copies(self._engine)
        if differing:
            message = f"step {step}: {differing}"
            self._folder.event("corruption", step=step, reason=message)
            raise CorruptionError(f"{message}. Nothing was saved since the last checkpoint, whose copies were equal: "
                                  "start the run again; if this happens twice on a host, replace the host")


def compare_copies(engine: DeepSpeedEngine) -> str:
    """Return a description of the copies that differ between ranks, the same on all ranks; "" if there are none.

    Collective.
    """
    own: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}  # (ranks with a copy, name) -> checksum
    any_differs = torch.zeros(1, dtype=torch.int32, device=engine.device)
    for copies in replicated_tensors(engine):
        sums = torch.stack([checksum(tensor).to(engine.device) for tensor in copies.tensors.values()])
        extremes = torch.cat([sums, ~sums])  # the largest ~x is that of the smallest x
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=copies.group)
        any_differs |= (extremes[:len(sums)] != ~extremes[len(sums):]).any()
        ranks = tuple(dist.get_process_group_ranks(copies.group))
        own |= {(ranks, name): value for name, value in zip(copies.tensors, sums, strict=True)}
    dist.all_reduce(any_differs, dist.ReduceOp.MAX)
    return _describe_differences(own) if any_differs.item() else ""


def _describe_differences(own: dict[tuple[tuple[int, ...], str], torch.Tensor]) -> str:
    """Name the first copy that differs, and the number of others. Collective, and the same on all ranks."""
    gathered = gather((socket.gethostname(), {key: int(value) for key, value in own.items()}))
    hosts = [host for host, _ in gathered]
    by_tensor: dict[tuple[tuple[int, ...], str], dict[int, int]] = defaultdict(dict)  # -> {rank: checksum}
    for rank, (_, sums) in enumerate(gathered):
        for (ranks, name), value in sums.items():
            by_tensor[ranks, name][rank] = value
    differing = {key: values for key, values in by_tensor.items() if len(set(values.values())) > 1}
    (_, name), values = next(iter(differing.items()))
    others = f" ({len(differing) - 1} other tensors also differ)" if len(differing) > 1 else ""
    return _describe(name, values, hosts) + others


def _describe(name: str, values: dict[int, int], hosts: list[str]) -> str:
    """Describe one tensor with different copies. The most frequent copy counts as right, unless two are as frequent."""
    (right, count), (_, next_count) = Counter(values.values()).most_common(2)
    if count == next_count:
        return f"the copies of {name} differ between {_list_ranks(list(values), hosts)}, and none has the majority"
    wrong = [rank for rank, value in values.items() if value != right]
    return f"the copy of {name} on {_list_ranks(wrong, hosts)} differs from those of {count} other ranks"


def _list_ranks(ranks: list[int], hosts: list[str]) -> str:
    named = [f"rank {rank} on {hosts[rank]}" for rank in ranks[:_MOST_RANKS_NAMED]]
    if len(ranks) > len(named):
        named.append(f"{len(ranks) - len(named)} more ranks")
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
