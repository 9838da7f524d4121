"""Expert parallelism on DeepSpeed's engine: its expert groups, and parameters that it treats as experts.

The layers of the model send the tokens (model/parallel/token_exchange.py). DeepSpeed 0.19.8 does the rest for
parameters that have `allreduce` False and a `group_name` (moe/utils.py, is_moe_param): it sums their gradients over the
ranks with the same experts, divides them by the number of all data-parallel ranks (runtime/zero/stage_1_and_2.py,
average_tensor), and ZeRO divides them over the ranks with the same experts. Norms and overflows are global.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from pretrain.config.layout import Layout
from pretrain.distributed.parallel_groups import ALONE, RankGroup
from pretrain.model.parameters import is_divided_expert


def create_expert_group(layout: Layout) -> RankGroup:
    """Let DeepSpeed create its expert groups, and return this rank's; collective.

    Inside a pipeline stage, neighboring ranks share the experts; ranks at a distance of expert_parallel_size hold the
    same experts. Tensor-parallel ranks share them like others, because each routes its own shard of the sequences: the
    groups are those of DeepSpeed's AutoEP with AutoTP (module_inject/auto_ep_folding.py). mp_size is 1 for this order.
    """
    size = layout.expert_parallel_size
    if size == 1:
        return ALONE
    for known in (deepspeed_groups._EXPERT_PARALLEL_GROUP, deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP):
        known.pop(_group_name(size), None)  # of an earlier engine, perhaps with another number of pipeline stages
    # the sizes are given, because DeepSpeed would read those of the last engine's mpu
    deepspeed_groups._create_expert_and_data_parallel(size, mp_size=1, pp_size=layout.pipeline_stages)
    handle = deepspeed_groups._get_expert_parallel_group(_group_name(size))
    return RankGroup(size, dist.get_rank(handle), handle)


def expert_data_group(engine: DeepSpeedEngine) -> dist.ProcessGroup:
    """Return the group of the ranks that hold the same experts as this one. The engine must have expert parallelism."""
    name = next(parameter.group_name for parameter in engine.module.parameters() if is_moe_param(parameter))
    group: dist.ProcessGroup = deepspeed_groups._get_expert_data_parallel_group(name)
    return group


def mark_experts(module: nn.Module, expert: RankGroup) -> None:
    """Make DeepSpeed treat the experts of which this rank holds some as such."""
    for parameter in module.parameters():
        if is_divided_expert(parameter):
            _mark(parameter, expert)


def mark_partitioned_experts(init: Init, expert: RankGroup) -> None:
    """Make `zero.Init` divide the experts over the ranks that hold the same ones.

    DeepSpeed 0.19.8 does so for parameters with these attributes, and then averages their gradients and sums their
    norms as for its AutoEP layers (runtime/zero/partition_parameters.py, _convert_to_deepspeed_param;
    runtime/zero/stage3.py, _autoep_expert_parallel_group).
    """
    if expert.size == 1:
        return
    divide, name = init._zero_init_param, _group_name(expert.size)

    def divide_by_family(parameter: Any) -> None:
        if is_divided_expert(parameter):
            _mark(parameter, expert)
            parameter.ds_zero_placement_family, parameter.ds_zero_partition_group_name = "autoep_expert", name
            parameter.ds_zero_partition_process_group = deepspeed_groups._get_expert_data_parallel_group(name)
        divide(parameter)

    init._zero_init_param = divide_by_family


def _mark(parameter: Any, expert: RankGroup) -> None:
    parameter.allreduce, parameter.group_name = False, _group_name(expert.size)


def with_expert_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups with the experts in groups of their own, after the others."""
    if not any(is_moe_param(parameter) for group in groups for parameter in group["params"]):
        return groups
    named = [{**group, "name": f"group {index}"} for index, group in enumerate(groups)]
    split: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(named)
    return split


@contextlib.contextmanager
def announced_experts(module: nn.Module) -> Iterator[None]:
    """Make `deepspeed.initialize` see that the model has experts, if DeepSpeed treats parameters as such.

    DeepSpeed 0.19.8 looks for modules of its class MoE (runtime/engine.py, _configure_distributed_model). The module
    that is added here has no parameters. It is removed again, so that checkpoints have no files for it.
    """
    if not any(is_moe_param(parameter) and not hasattr(parameter, "ds_id") for parameter in module.parameters()):
        yield
        return
    module.add_module(_ANNOUNCEMENT, _Announcement())
    try:
        yield
    finally:
        delattr(module, _ANNOUNCEMENT)


_ANNOUNCEMENT = "announced_experts"


class _Announcement(MoE):
    """A module without parameters for which DeepSpeedEngine sets `has_moe_layers`."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0  # listed in the engine's checkpoints, and not used

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: the groups exist already."""


def _group_name(size: int) -> str:
    """Return the name under which DeepSpeed registers the groups (utils/groups.py)."""
    return f"ep_size_{size}"
