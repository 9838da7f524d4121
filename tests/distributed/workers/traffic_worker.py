"""One rank that counts the transfers of one step of a real engine, and the values that the host reads from the device.

    traffic_worker.py CASES.json RESULTS.json      a case: {"name", "config", "flags"}

A case may have "plain", as in update_worker.py.
"""

import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.distributed.collectives import gather
from pretrain.engine.steps import open_loader, train_batch
from tests.distributed.workers.update_worker import functions_of_deepspeed
from tests.distributed.workers.worker import end, engine_of, plan_of
from tests.support.cases_loop import each_case

# c10d operator -> (name, index of the argument with the complete tensor, factor: a ring of n ranks sends factor(n)
# times the tensor's bytes)
OPERATORS = {
    "allreduce_": ("all-reduce", 0, lambda n: 2 * (n - 1) / n), "reduce_": ("reduce", 0, lambda n: (n - 1) / n),
    "_allgather_base_": ("all-gather", 0, lambda n: (n - 1) / n),
    "allgather_": ("all-gather", 0, lambda n: (n - 1) / n),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, lambda n: (n - 1) / n),
    "_reduce_scatter_base_": ("reduce-scatter", 1, lambda n: (n - 1) / n),
    "reduce_scatter_": ("reduce-scatter", 1, lambda n: (n - 1) / n), "send": ("send", 0, lambda n: 1.0),
    "broadcast_": ("broadcast", 0, lambda n: (n - 1) / n),
    "alltoall_base_": ("all-to-all", 1, lambda n: (n - 1) / n),
}
SMALL = 64  # elements; smaller tensors are norms, losses, flags and shapes, and are not counted


# operators that return a value, or a shape that depends on values, to the host, which waits for the device
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero")


def reader() -> str:
    """Return the file of this project or of DeepSpeed that runs."""
    frames = [frame.filename for frame in traceback.extract_stack()]
    found = [name for name in frames if "/pretrain/" in name or "/deepspeed/" in name]
    return re.sub(r".*/(pretrain|deepspeed)/", r"\1/", found[-1])


class ListCounter(TorchFunctionMode):
    """Counts `tolist` and `cpu`, which wait for another device, but need no operator for a tensor of the CPU."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.cpu):
            self.reads[reader()] += 1
        return func(*args, **(kwargs or {}))


class StepCounter(TorchDispatchMode):
    """Counts the bytes that this rank sends by collective, its collectives, and who reads values from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys((name for name, _, _ in OPERATORS.values()), 0.0)
        self.collectives = self.small = 0
        self.reads: Counter[str] = Counter()  # by file, in this project or in DeepSpeed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in READS:
            self.reads[reader()] += 1
        if func.namespace == "c10d" and func._opname in OPERATORS:
            sizes = [tensor.numel() for tensor in tree_leaves(args[0]) if torch.is_tensor(tensor)]
            self.collectives += 1
            self.small += max(sizes, default=0) <= SMALL
            name, position, factor = OPERATORS[func._opname]
            ranks = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            for tensor in tree_leaves(args[position]):
                if torch.is_tensor(tensor) and tensor.numel() > SMALL:
                    self.sent[name] += factor(ranks) * tensor.numel() * tensor.element_size()
        elif func.namespace == "c10d" and func._opname not in ("recv_", "barrier", "monitored_barrier_"):
            raise NotImplementedError(f"c10d.{func._opname}")
        return func(*args, **(kwargs or {}))


def disk_bytes() -> dict[str, int]:
    """Return the bytes that this process has read from and written to disks so far."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(rows[name]) for name in ("read_bytes", "write_bytes")}


def traffic(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Run two steps; return the counts of each rank's second step, and the bytes of its disk."""
    plan = plan_of(case)
    with functions_of_deepspeed(case.get("plain", "")):
        engine = engine_of(plan)
    loader = open_loader(engine, plan, "train")
    train_batch(engine, loader.step(0))
    before = disk_bytes()
    with StepCounter() as counter, ListCounter(counter.reads):
        train_batch(engine, loader.step(plan.layout.global_batch_size))
    after = disk_bytes()
    loader.close()
    end(engine)
    return gather({**counter.sent, "collectives": counter.collectives, "small": counter.small,
                   "reads": dict(counter.reads), **{name: after[name] - before[name] for name in after}})


if __name__ == "__main__":
    each_case(traffic)
