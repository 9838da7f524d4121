"""The predicted memory next to what a run really takes, and what to change when it runs out of memory."""

import gc
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.layout import Layout
from pretrain.distributed.process import resident_bytes
from pretrain.distributed.world import World
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import shape_of
from pretrain.memory.estimate.rank_memory import MemoryEstimate, estimate_memory
from pretrain.memory.hardware import make_cluster
from pretrain.memory.measure.out_of_memory import is_out_of_memory
from pretrain.memory.search.axes import OFFLOADS, Axes
from pretrain.memory.search.candidates import Candidate, generate_candidates
from pretrain.memory.search.compare import Workload, estimate_candidate
from pretrain.memory.sizes import with_unit

if TYPE_CHECKING:
    from pretrain.config.validate import Plan
    from pretrain.memory.measure.cpu_step_peak import StepTensors

REPORTED_STEP = 2  # of this start: the first step makes the optimizer's states
_NEARLY = 0.85  # of what the failed layout was predicted to take: a change must save at least the rest
_CHANGES = 3
# What a process on a CPU grows by from its start to the end of a step, besides its tensors: code of libraries that is
# touched, DeepSpeed's shared memory for collectives (66 MiB a rank), oneDNN's kernels, and freed memory that the
# allocator keeps. Measured: 30 to 213 MiB, models of 0.3 to 25 M parameters.
PROCESS_GROWTH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class MemoryWatch:
    """What was there before the engine was built; all sizes of one rank."""

    plan: "Plan"
    world: World
    device_kind: str  # cpu, cuda
    room_bytes: int  # for tensors, at the start
    used_bytes: int  # by the process at the start; 0 on cuda
    tensors: "StepTensors | None" = None  # of step REPORTED_STEP; None on cuda, whose allocator keeps count

    @classmethod
    def start(cls, plan: "Plan", world: World) -> "MemoryWatch":
        """To be called before the engine is built; on CUDA, where torch is, it asks the device."""
        from deepspeed.accelerator import get_accelerator

        if get_accelerator().device_name() != "cpu":
            return cls(plan, world, "cuda", int(get_accelerator().total_memory()), 0)
        from pretrain.memory.measure.cpu_step_peak import StepTensors

        room = max(0, _host_room(world.local_size) - PROCESS_GROWTH_BYTES)
        return cls(plan, world, "cpu", room, resident_bytes()[0], StepTensors())

    @property
    def predicted(self) -> MemoryEstimate:
        """For the rank that needs most."""
        return estimate_memory(shape_of(self.plan.model), self.plan.layout)

    def needed_bytes(self, found: MemoryEstimate) -> int:
        """Of the memory that may run out: the device's, which on a CPU is the host's too."""
        device = found.peak.total(location="device")
        return device + found.host_bytes if self.device_kind == "cpu" else device

    def found_bytes(self) -> int:
        """The largest so far of this rank: the allocator's on CUDA, growth of the resident set on a CPU."""
        if self.device_kind == "cuda":
            from deepspeed.accelerator import get_accelerator

            return int(get_accelerator().max_memory_allocated())
        return max(0, resident_bytes()[1] - self.used_bytes)

    def before_step(self, step: int, engine: Any) -> None:
        """Begin to measure before step REPORTED_STEP of this start."""
        if self.tensors is not None and step == REPORTED_STEP:
            self.tensors.begin(engine)

    def after_step(self, step: int, say: Callable[[str], None]) -> None:
        """Report one line after step REPORTED_STEP of this start. Collective at that step."""
        if step != REPORTED_STEP:
            return
        if self.tensors is not None:
            self.tensors.end()
        try:
            predicted = self.predicted
        except ConfigError as error:
            say(f"memory: {self._measured(None)}; no prediction: {error}")
            return
        say(f"memory: predicted {with_unit(self.needed_bytes(predicted))} at the peak ({_by_role(predicted)}); "
            f"{self._measured(predicted)}")

    def _measured(self, predicted: MemoryEstimate | None) -> str:
        """The measurement of the rank that takes the most memory. Collective."""
        from pretrain.distributed.collectives import gather

        if self.tensors is None:
            return f"measured {with_unit(max(gather(self.found_bytes())))} allocated on the device"
        ranks = gather((self.tensors.peak_bytes, self.tensors.held_bytes, resident_bytes()[0]))
        resident = with_unit(max(resident for *_, resident in ranks))
        rest = f"the process has {resident} resident, with libraries and freed memory that it keeps"
        peaks = [peak for peak, *_ in ranks if peak is not None]
        if peaks:
            return f"measured {with_unit(max(peaks))} of tensors; {rest}"
        held = max(held or 0 for _, held, _ in ranks)
        there = f" (predicted {with_unit(_in_memory(predicted))} there)" if predicted else ""
        return f"measured {with_unit(held)} of tensors between backward pass and optimizer step{there}; {rest}"

    def explain(self, error: BaseException) -> list[str]:
        """What to say of an error; nothing where it is not about memory. Frees what the error's frames hold."""
        if not is_out_of_memory(error):
            return []
        found = with_unit(self.found_bytes())
        taken = f"the process had grown by {found}" if self.device_kind == "cpu" else f"found {found} in use before it"
        lines = [f"out of memory{_place(error)}: {_first_line(error)}"]
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        predicted = self.predicted
        needed = self.needed_bytes(predicted)
        lines.append(f"predicted {with_unit(needed)} of tensors at the peak ({_by_role(predicted)}); {taken}; there "
                     f"was room for {with_unit(self.room_bytes)} of tensors")
        changes = list(self.changes(min(self.room_bytes, int(_NEARLY * needed))))
        if not changes:
            return [*lines, "no other layout of these ranks is predicted to fit: use more ranks or a smaller model"]
        return [*lines, "predicted to fit, the fastest first:", *(f"  {text}" for text in changes)]

    def changes(self, budget_bytes: int) -> Iterator[str]:
        """At most three changes of this layout that would fit, the fastest first, none of which contains another."""
        layout = self.plan.layout
        in_node = self.world.local_size if layout.world_size % self.world.local_size == 0 else 1
        cluster = make_cluster(gpu=None, world_size=layout.world_size, nodes=None, gpus_per_node=in_node)
        workload = Workload(cluster, self.plan.model.num_parameters(), shape_of(self.plan.model), self.plan.model)
        found = []
        for candidate in alternatives(layout, workload):
            row = estimate_candidate(candidate, workload)
            if not row.rejection and row.time and self.needed_bytes(row.estimate) <= budget_bytes:
                changed = differences(layout, candidate.layout)
                needed = self.needed_bytes(row.estimate)
                found.append((round(row.time.total_seconds, 6), len(changed), -needed, changed))
        said: list[set[str]] = []
        for _, _, needed, changed in sorted(found, key=lambda one: one[:3]):
            if changed and not any(kinds <= set(changed) for kinds in said) and len(said) < _CHANGES:
                said.append(set(changed))
                yield f"{', '.join(changed.values())}: {with_unit(-needed)}"


def alternatives(layout: Layout, workload: Workload) -> list[Candidate]:
    """Layouts of the same ranks, model and global batch: other stages, offload to the host, recomputation, stages of
    a pipeline, smaller micro-batches. Each is the layout as it runs now with these changed.
    """
    micro = [size for size in range(1, layout.micro_batch_size + 1) if layout.micro_batch_size % size == 0]
    interval = layout.activation_checkpoint_interval
    axes = Axes(
        zero_stages=tuple(stage for stage in range(4) if stage >= layout.zero_stage),
        offloads=tuple(word for word in OFFLOADS if "nvme" not in word),
        pipeline_stages=tuple({layout.pipeline_stages, 2 * layout.pipeline_stages}),
        precisions=(layout.precision,), activation_checkpoint_intervals=tuple({interval, 1}),
        micro_batch_sizes=tuple(micro), seq_lengths=(layout.seq_length,), global_batch_size=layout.global_batch_size,
        grad_accum_dtypes=(layout.grad_accum_dtype or "",))
    kept = {name: getattr(layout, name) for name in ("optimizer", "optimizer_moments", "device_kind", "overlap_comm")}
    return [replace(candidate, layout=replace(candidate.layout, **kept))
            for candidate in generate_candidates(axes, workload.cluster, workload.shape).candidates]


def differences(old: Layout, new: Layout) -> dict[str, str]:
    """What changes from one layout to the other, in the JSON's words, by kind."""
    said = {}
    if new.micro_batch_size != old.micro_batch_size:
        said["micro"] = f"micro-batch {new.micro_batch_size} x {new.gradient_accumulation_steps} accumulation steps"
    if new.activation_checkpoint_interval != old.activation_checkpoint_interval:
        said["recompute"] = f'"pipeline": {{"activation_checkpoint_interval": {new.activation_checkpoint_interval}}}'
    for kind, name, word in (("stage", "zero_stage", "zero_optimization.stage"),
                             ("optimizer", "offload_optimizer", "zero_optimization.offload_optimizer.device"),
                             ("param", "offload_param", "zero_optimization.offload_param.device"),
                             ("pipeline", "pipeline_stages", "pipeline.stages")):
        if getattr(new, name) != getattr(old, name):
            said[kind] = f"{word} {getattr(new, name)}"
    return said


def print_advice(lines: list[str], world: World) -> None:
    """As every error of a run, with the rank: others may have room."""
    print("\n".join(f"ds-pretrain: {'error: ' if not number else ''}rank {world.rank}: {line}"
                    for number, line in enumerate(lines)), file=sys.stderr, flush=True)


def _place(error: BaseException) -> str:
    """The innermost of this package's own lines."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__)
           if f"{os.sep}pretrain{os.sep}" in frame.filename]
    return f" in {own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _in_memory(found: MemoryEstimate) -> int:
    """Bytes between two micro-batches, less what lies on NVMe."""
    return found.steady.total() - found.steady.total(location="nvme")


def _by_role(found: MemoryEstimate) -> str:
    sizes = ((role, found.peak.total(role)) for role in dict.fromkeys(role for role, _, _ in found.peak.rows()))
    return ", ".join(f"{role.replace('_', ' ')} {with_unit(size)}" for role, size in sizes)


def _host_room(local_size: int) -> int:
    """This rank's share of what the host has left, or of what the process may still map, if that is less."""
    import psutil

    room = int(psutil.virtual_memory().available) // max(1, local_size)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return room
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    return min(room, max(0, limit - mapped))
