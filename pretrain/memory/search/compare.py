"""Layouts next to one another: what each needs, whether it fits, how long a step takes, whether it is run here."""

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.config.arguments import RunArguments
from pretrain.config.auto import DEFAULT_LEARNING_RATE
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.rules import RULES, libaio, writable_folders
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.memory.estimate.deepspeed_formulas import DeepSpeedEstimate, deepspeed_estimate
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.rank_memory import MemoryEstimate, estimate_memory
from pretrain.memory.hardware import Cluster
from pretrain.memory.search.combinations import Candidate, group_micro_batches
from pretrain.memory.sizes import with_unit
from pretrain.memory.step_time.time_model import (
    KERNEL_EFFICIENCY,
    StepTime,
    model_flops_per_token,
    stage_share,
    step_time,
)
from pretrain.memory.step_time.traffic import Transfer, rank_parameters, step_traffic
from pretrain.model.config import ModelConfig

_OTHER_MACHINE = (libaio, writable_folders)  # rules about the machine that plans, not about the one that runs
_NEAR = 1.02  # of the fastest step: a larger micro-batch is taken, whose matrix products are the more efficient


@dataclass(frozen=True)
class Workload:
    """What is to be trained, and on what."""

    cluster: Cluster
    num_parameters: int
    shape: ModelShape | None = None  # None: only the number of parameters is known
    model: ModelConfig | None = None  # None: this project does not train it
    name: str = ""
    kernel_efficiency: float = KERNEL_EFFICIENCY

    def flops_per_token(self, seq_length: int) -> float:
        """Forward and backward."""
        return model_flops_per_token(self.shape, self.num_parameters, seq_length)


@dataclass(frozen=True)
class ComparisonRow:
    """One layout, judged."""

    candidate: Candidate
    estimate: MemoryEstimate
    traffic: list[Transfer]
    time: StepTime | None  # None: only states are known
    shortage: str  # why it does not fit; "": it does
    rejection: str  # why this project does not run the JSON as it is; "": it does
    deepspeed: DeepSpeedEstimate | None

    @property
    def fits(self) -> bool:
        return not self.shortage

    @property
    def recommendable(self) -> bool:
        return self.fits and not self.rejection


def estimate_candidate(candidate: Candidate, workload: Workload) -> ComparisonRow:
    """A row of the comparison. Raises ConfigError for a layout that no estimate can be given of."""
    layout, shape, cluster = candidate.layout, workload.shape, workload.cluster
    found = estimate_memory(shape, layout, num_parameters=None if shape else workload.num_parameters)
    part = rank_parameters(layout, shape, workload.num_parameters)
    traffic = step_traffic(layout, part, shape)
    flops = workload.flops_per_token(layout.seq_length)
    time = None if shape is None else step_time(
        layout, cluster, traffic, part, flops_per_token=flops, slowest=stage_share(layout, shape, flops),
        kernel_efficiency=workload.kernel_efficiency)
    said = deepspeed_estimate(layout, num_parameters=workload.num_parameters, shape=shape, nodes=cluster.nodes,
                              gpus_per_node=cluster.gpus_per_node)
    return ComparisonRow(candidate, found, traffic, time, memory_shortage(found, cluster),
                         rejection_reason(candidate, workload), said)


def compare(candidates: Sequence[Candidate], workload: Workload, *,
            all_micro_batches: bool = False) -> list[ComparisonRow]:
    """A row of every layout; of those that differ in the micro-batch only, the best one."""
    if all_micro_batches:
        return [estimate_candidate(candidate, workload) for candidate in candidates]
    return [best_micro_batch(_until_too_large(group, workload)) for group in group_micro_batches(candidates)]


def _until_too_large(candidates: list[Candidate], workload: Workload) -> list[ComparisonRow]:
    """Rows of growing micro-batches, up to the first that does not fit."""
    rows: list[ComparisonRow] = []
    for candidate in sorted(candidates, key=lambda one: one.layout.micro_batch_size):
        rows.append(estimate_candidate(candidate, workload))
        if not rows[-1].fits:
            break
    return rows


def best_micro_batch(rows: list[ComparisonRow]) -> ComparisonRow:
    """The largest among the fastest of those that fit; the smallest where none fits."""
    fitting = [row for row in rows if row.fits and row.time is not None]
    if not fitting:
        return min(rows, key=lambda row: row.candidate.layout.micro_batch_size)
    fastest = min(row.time.total_seconds for row in fitting if row.time)
    near = [row for row in fitting if row.time and row.time.total_seconds <= _NEAR * fastest]
    return max(near, key=lambda row: row.candidate.layout.micro_batch_size)


def recommend(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """The fastest of those that fit and that this project runs; the emptiest device among equals. None: none is."""
    return min((row for row in rows if row.recommendable), default=None, key=lambda row: (
        row.time.total_seconds if row.time else 0.0, row.estimate.device_bytes))


def memory_shortage(found: MemoryEstimate, cluster: Cluster) -> str:
    """Which memory does not suffice, for what; "": it fits with the margin."""
    ranks = min(cluster.gpus_per_node, cluster.world_size)
    places = (
        ("the device", found.peak.total(location="device"), cluster.device_budget_bytes),
        ("a node's host memory", found.host_bytes * ranks, cluster.host_budget_bytes),
        ("a node's NVMe", found.peak.total(location="nvme") * ranks, cluster.nvme_bytes),
    )
    for where, needed, there in places:
        if needed > there:
            return f"{where}: {with_unit(needed)} of {with_unit(there)}"
    return ""


def rejection_reason(candidate: Candidate, workload: Workload) -> str:
    """What this project's own check says of the JSON as it is, without its file's name; "": it runs it."""
    layout, model = candidate.layout, workload.model
    if workload.shape is not None and model is None:
        return workload.shape.untrainable_reason or f"{workload.shape.architecture} is not implemented"
    if layout.expert_parallel_size > 1:
        return "expert parallelism is not implemented"
    if model is None:
        return ""
    if layout.seq_length > model.max_positions:
        return f"--seq_length {layout.seq_length} is more than the model's {model.max_positions} positions"
    device = Device("cuda", fp16=True, bf16=workload.cluster.gpu.knows_bf16,
                    memory_bytes=workload.cluster.gpu.memory_bytes)
    file = DsFile(candidate.path or candidate.name, _anywhere(candidate.config))
    on_nvme = "nvme" in (layout.offload_optimizer, layout.offload_param)
    args = RunArguments(save=tempfile.gettempdir(), train_steps=1, seq_length=layout.seq_length,
                        nvme_path=tempfile.gettempdir() if on_nvme else None,
                        learning_rate=None if "optimizer" in candidate.config else DEFAULT_LEARNING_RATE)
    try:
        settings = resolve_ds_config(file, args, model=model, world_size=layout.world_size, device=device)
        for rule in RULES:
            if rule not in _OTHER_MACHINE:
                rule(settings)
    except ConfigError as error:
        return str(error).removeprefix(f"{file.path}: ")
    return ""


def _anywhere(config: dict[str, Any]) -> dict[str, Any]:
    """A copy whose NVMe folders are left open: they need not be on the machine that plans."""
    config = copy.deepcopy(config)
    for block in ("offload_optimizer", "offload_param"):
        own = get_value(config, f"zero_optimization.{block}")
        if isinstance(own, dict) and "nvme_path" in own:
            own["nvme_path"] = "auto"
    return config
