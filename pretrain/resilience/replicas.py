"""Find the tensors of which several ranks hold equal copies, and compare the checksums of their bits."""

import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

from pretrain.callback import Callback, Run
from pretrain.distributed.collectives import gather
from pretrain.engine.checksums import checksum, is_complete, partition_of
from pretrain.engine.expert_parallelism import expert_data_group
from pretrain.engine.steps import tensor_parallel_size
from pretrain.errors import CorruptionError
from pretrain.model.parameters import part_of

_MOST_RANKS_NAMED = 8


class ReplicaCheck(Callback):
    """Compares checksums of the parameters between the ranks that hold copies of them.

    A check reads each copy once on its device, reduces two integers per parameter in each group of ranks, and reads one
    number on the host.
    """

    order = 10

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._checked_step = -1

    def accepted(self, run: Run) -> None:
        """Compare the copies every --replica_check_interval steps."""
        if run.step % self._interval == 0:
            self.check(run)

    def before_save(self, run: Run) -> None:
        self.check(run)

    def rolled_back(self, run: Run) -> None:
        self.check(run)

    def check(self, run: Run) -> None:
        """Compare the copies, once in each step; collective. Raises CorruptionError, which names the rank, on all."""
        if run.step == self._checked_step:
            return
        self._checked_step = run.step
        differing = compare_copies(run.engine)
        if differing:
            message = f"step {run.step}: {differing}"
            run.event("corruption", reason=message)
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
        extremes = torch.cat([sums, ~sums])  # the largest ~x belongs to the smallest x
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
    if not differing:
        return "checksums of copies differ according to the devices, and are equal: a device computes wrongly"
    (_, name), values = next(iter(differing.items()))
    others = f" ({len(differing) - 1} other tensors also differ)" if len(differing) > 1 else ""
    return _describe(name, values, hosts) + others


def _describe(name: str, values: dict[int, int], hosts: list[str]) -> str:
    """Describe one tensor with different copies. The most frequent copy counts as right, unless two are as frequent."""
    (right, count), (_, next_count) = Counter(values.values()).most_common(2)
    if count == next_count:
        return f"the copies of {name} differ between {list_ranks(list(values), hosts)}, and none has the majority"
    wrong = [rank for rank, value in values.items() if value != right]
    return f"the copy of {name} on {list_ranks(wrong, hosts)} differs from those of {count} other ranks"


def list_ranks(ranks: Sequence[int], hosts: Sequence[str] | Mapping[int, str]) -> str:
    """Name ranks with their hosts, in words."""
    named = [f"rank {rank} on {hosts[rank]}" for rank in ranks[:_MOST_RANKS_NAMED]]
    if len(ranks) > len(named):
        named.append(f"{len(ranks) - len(named)} more ranks")
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


@dataclass(frozen=True)
class Copies:
    """Tensors that must be equal, bit by bit, on all ranks of a group. All ranks have the same order."""

    group: dist.ProcessGroup
    tensors: dict[str, torch.Tensor]  # by name


def replicated_tensors(engine: DeepSpeedEngine) -> list[Copies]:
    """Return the copies that this rank holds: of its data-parallel group, then of smaller groups.

    - ZeRO-0 to 2: the parameters. ZeRO-3: the small parameters that are not partitioned (DeepSpeed 0.19.8,
      runtime/zero/partition_parameters.py: ds_persist). Secondary partitions (zero_hpz_partition_size) do not exist
      between two steps: runtime/zero/stage3.py, invalidate_secondary_tensor.
    - ZeRO-0: also the optimizer states and, if there are any, the fp32 master weights.
    - Expert parallelism: the experts, on the ranks that hold the same ones.
    - Tensor parallelism: parameters and optimizer states of which these ranks do not hold parts, such as norms. Of
      those that ZeRO-3 partitions, the partition.
    - Pipelines: tied parameters, on the stages that use them.
    """
    whole = [(name, parameter) for name, parameter in engine.module.named_parameters() if is_complete(parameter)]
    experts = {name: parameter.data for name, parameter in whole if is_moe_param(parameter)}
    parameters = {name: parameter.data for name, parameter in whole if name not in experts}
    states = _optimizer_states(engine)
    found = [Copies(engine.seq_data_parallel_group, parameters | states)]
    if experts:
        found.append(Copies(expert_data_group(engine), experts))
    if tensor_parallel_size(engine) > 1:
        complete = {name for name, parameter in engine.module.named_parameters() if part_of(parameter) is None}
        held = parameters | _partitions(engine) | states
        found.append(Copies(bwc_tensor_model_parallel_group(engine.mpu),
                            {name: tensor for name, tensor in held.items() if name.split(" ")[0] in complete}))
    if isinstance(engine.module, PipelineModule):
        for key, tied in engine.module.tied_comms.items():
            weights = {name: tied["module"].get_parameter(name).data for name in tied["weight_attr"]}
            found.append(Copies(tied["group"], {f"{key}.{name} (tied)": weight for name, weight in weights.items()}))
    return [copies for copies in found if copies.tensors and dist.get_world_size(copies.group) > 1]


def _partitions(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return this rank's partitions of the parameters under ZeRO-3, by name; not those that are on NVMe."""
    return {name: partition for name, parameter in engine.module.named_parameters()
            if not is_complete(parameter) and (partition := partition_of(parameter)) is not None}


def _optimizer_states(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return the optimizer states and master weights by name, if each data-parallel rank has all of them."""
    if engine.zero_optimization_stage() > 0 or isinstance(engine.optimizer, BF16_Optimizer):
        return {}
    optimizer = engine.basic_optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for number, weight in enumerate(weight for group in optimizer.param_groups for weight in group["params"]):
        name = names.get(id(weight))
        if name is None:
            name = f"master weights {number}"
            found[name] = weight.data
        found |= {f"{name} ({key})": value for key, value in optimizer.state.get(weight, {}).items()
                  if torch.is_tensor(value) and value.dim() > 0}
    return found
