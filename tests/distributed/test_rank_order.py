"""The numbers of the ranks, and their groups, are those of DeepSpeed, for all degrees up to 4. No ranks are started."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed import comm
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups as deepspeed_groups

from pretrain.config.layout import Layout
from pretrain.distributed.parallel_groups import RankOrder
from pretrain.distributed.requirements import EXPERTS_SINCE, is_at_least
from pretrain.engine.expert_parallelism import create_expert_group
from pretrain.engine.parallelism import rank_order

DEGREES = list(itertools.product((1, 2, 3, 4), repeat=3))
AXES = {"pipe": "pipeline", "data": "data", "sequence": "sequence", "model": "tensor"}  # DeepSpeed's name -> ours


def _assert_equal(order: RankOrder, topology: ProcessTopology) -> None:
    """Assert that all ranks have the same coordinates in both, and the same groups."""
    for coordinates, rank in topology.mapping.items():
        own = order.coordinates(rank)
        assert {axis: own[AXES[axis]] for axis in topology.axes} == coordinates._asdict()
    for axis in topology.axes:
        assert sorted(order.groups_along(AXES[axis])) == sorted(topology.get_axis_comm_lists(axis)), axis


def _created_groups(monkeypatch: pytest.MonkeyPatch, world_size: int, create: Callable[[], Any]) -> list[list[int]]:
    """Return the ranks of the process groups that a function of DeepSpeed would create, in this order."""
    created: list[list[int]] = []

    def new_group(ranks: list[int]) -> list[int]:
        created.append(list(ranks))
        return created[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
        for name, value in {"is_initialized": lambda: True, "get_rank": lambda group=None: 0, "new_group": new_group,
                            "get_world_size": lambda group=None: world_size}.items():
            patch.setattr(comm, name, value)
        for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS",
                     "_EXPERT_DATA_PARALLEL_GROUP_RANKS"):
            patch.setattr(deepspeed_groups, name, {})
        patch.setattr(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", None)
        patch.setattr(parallel_state_sp, "_SEQUENCE_DATA_PARALLEL_GROUP", None)
        create()
    return created


def test_the_order_is_that_of_a_pipeline_with_tensor_parallelism() -> None:
    for pipeline, data, tensor in DEGREES:
        layout = Layout(world_size=pipeline * data * tensor, pipeline_stages=pipeline, tensor_parallel_size=tensor)
        _assert_equal(rank_order(layout), PipeModelDataParallelTopology(num_pp=pipeline, num_dp=data, num_mp=tensor))


def test_sequence_parallel_ranks_are_between_data_and_tensor_parallel_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's Ulysses has no tensor-parallel ranks. Its second group are the ranks over which ZeRO partitions."""
    for data, sequence, tensor in DEGREES:
        order = RankOrder(data=data, sequence=sequence, tensor=tensor)
        _assert_equal(order, ProcessTopology(["data", "sequence", "model"], [data, sequence, tensor]))
        if sequence > 1 and tensor == 1:
            created = _created_groups(monkeypatch, data * sequence, lambda sequence=sequence:  # type: ignore[misc]
                                      parallel_state_sp.initialize_sequence_parallel(sequence))
            assert created == [*order.groups_along("sequence"), list(range(data * sequence))]


@pytest.mark.skipif(not is_at_least(EXPERTS_SINCE), reason=f"needs DeepSpeed {EXPERTS_SINCE}")
def test_expert_groups_are_those_of_autoep_with_autotp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks share experts, which DeepSpeed calls folding. Each pipeline stage has its own groups."""
    folding = pytest.importorskip("deepspeed.module_inject.auto_ep_folding")
    compared = 0
    for pipeline, data, tensor in DEGREES:
        stage = data * tensor
        for expert in (size for size in range(tensor, stage + 1, tensor) if size > 1 and stage % size == 0):
            world_size = pipeline * stage
            layout = Layout(world_size=world_size, pipeline_stages=pipeline, tensor_parallel_size=tensor,
                            expert_parallel_size=expert)
            created = _created_groups(monkeypatch, world_size,
                                      lambda layout=layout: create_expert_group(layout))  # type: ignore[misc]
            tables = folding.expected_folding_group_tables(folding.build_folding_spec(
                world_size=world_size, pp_size=pipeline, tp_size=tensor, ep_size=expert))
            assert sorted(created) == sorted(map(list, (*tables.edp_groups, *tables.ep_groups)))
            assert tables.tp_groups == tuple(map(tuple, rank_order(layout).groups_along("tensor")))
            compared += 1
    assert compared > 80
