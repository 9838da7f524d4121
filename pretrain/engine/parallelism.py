"""Process groups of a layout, and the `mpu` object with which a plain DeepSpeed engine asks for them.

A pipeline engine has its own: PipelineModule makes a PipelineParallelGrid from the topology.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pretrain.config.layout import Layout
from pretrain.distributed.parallel_groups import ParallelGroups, RankGroup, RankOrder, create_group
from pretrain.engine.expert_parallelism import create_expert_group


def rank_order(layout: Layout) -> RankOrder:
    """Return the order in which the ranks of a layout are numbered."""
    return RankOrder(layout.pipeline_stages, layout.data_parallel_size, layout.sequence_parallel_size,
                     layout.tensor_parallel_size)


def create_parallel_groups(layout: Layout) -> ParallelGroups:
    """Create the process groups of the ranks that share matrices, sequences and experts; collective."""
    order = rank_order(layout)
    return ParallelGroups(tensor=create_group(order.groups_along("tensor")),
                          sequence=create_group(order.groups_along("sequence")), expert=create_expert_group(layout))


def create_mpu(layout: Layout, groups: ParallelGroups) -> "Mpu | None":
    """Return the `mpu` of a plain engine; collective. None if all ranks are data-parallel, or for a pipeline engine."""
    if layout.uses_pipeline_module or (groups.tensor.size == 1 and groups.sequence.size == 1):
        return None
    order = rank_order(layout)
    sharing = RankOrder(1, order.data * order.sequence, 1, order.tensor)  # data and sequence ranks as one axis
    tensor, sequence, data, sequence_data = (_with_handle(axes.groups_along(axis)) for axes, axis in (
        (order, "tensor"), (order, "sequence"), (order, "data"), (sharing, "data")))
    return Mpu(tensor, sequence, data, sequence_data)


def engine_config(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON for `deepspeed.initialize`: without the degrees that this program's layers implement.

    With these keys, DeepSpeed would replace the layers by layers of AutoTP and AutoEP, and ask for a mesh of ranks.

    Pipeline stages send complete tensors. By default, DeepSpeed 0.19.8 (runtime/pipe/engine.py, is_pipe_partitioned)
    sends each tensor-parallel rank's part of them, and gathers these parts: it expects equal tensors on these ranks.
    Here, the ranks have different shards of the sequences.

    Defaults that versions of DeepSpeed do not share are those of 0.19.8: before 0.19.4, a JSON without the keys clips
    no gradients, and does not look for NaN in bf16.
    """
    own = ("tensor_parallel", "expert_parallel", "sequence_parallel_size")
    complete = {"pipe_partitioned": False, "grad_partitioned": False}
    bf16 = {"bf16": {"check_grad_overflow": True, **ds_config["bf16"]}} if ds_config.get("bf16") else {}
    return {"gradient_clipping": 1.0, **{key: value for key, value in ds_config.items() if key not in own}, **bf16,
            "pipeline": {**(ds_config.get("pipeline") or {}), **complete}}


def _with_handle(groups: list[list[int]]) -> RankGroup:
    """Create the process groups, of one rank too: DeepSpeed communicates in them, and None means all ranks."""
    own, rank = RankGroup(), dist.get_rank()
    for ranks in groups:
        handle = dist.new_group(ranks)
        if rank in ranks:
            own = RankGroup(len(ranks), ranks.index(rank), handle)
    return own


@dataclass(frozen=True)
class Mpu:
    """Megatron's "model parallel unit", with the methods that DeepSpeed 0.19.8 calls (utils/groups.py, utils/bwc.py).

    DeepSpeed's model-parallel ranks are the tensor-parallel ranks.
    """

    tensor: RankGroup
    sequence: RankGroup
    data: RankGroup  # ranks with different samples
    sequence_data: RankGroup  # ranks over which ZeRO partitions: data-parallel times sequence-parallel ranks

    def get_model_parallel_rank(self) -> int:
        return self.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self.tensor.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.tensor.handle

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.data.handle

    def get_data_parallel_group_ranks(self) -> list[int]:
        assert self.data.handle is not None
        return dist.get_process_group_ranks(self.data.handle)

    def get_sequence_parallel_rank(self) -> int:
        return self.sequence.rank

    def get_sequence_parallel_world_size(self) -> int:
        return self.sequence.size

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        return self.sequence.handle

    def get_sequence_data_parallel_rank(self) -> int:
        return self.sequence_data.rank

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.sequence_data.size

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.sequence_data.handle
