"""Measure the memory of a run, and report it next to the prediction; name changes that fit if it was not enough."""

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed import DeepSpeedEngine

from pretrain.callback import Callback, Run, StepResult
from pretrain.child import child_command
from pretrain.distributed.own_gpu import free_gpu_bytes, open_gpu
from pretrain.distributed.process import is_out_of_memory, resident_bytes
from pretrain.distributed.world import World, running_environment
from pretrain.errors import ConfigError
from pretrain.memory.estimate.estimate_memory import MemoryEstimate, estimate_memory
from pretrain.memory.footprint import with_unit
from pretrain.memory.plan_remarks import COMPARE, prediction_text, sizes_by_role
from pretrain.memory.storage_tracker import call_after_backward, storage_of, walk_tensors

if TYPE_CHECKING:
    from pretrain.config.plan import Plan
    from pretrain.data.loader import MicroBatch

REPORTED_STEP = 2  # counted from the start of this process: the first step allocates the optimizer states
# Growth of a CPU process from its start to the end of a step, without its tensors: library code that is loaded into
# memory, DeepSpeed's shared memory for collectives (66 MiB a rank), oneDNN's kernels, and freed memory that the
# allocator keeps. Measured: 30 to 213 MiB with models of 0.3 to 25 M parameters.
PROCESS_GROWTH_BYTES = 256 * 2**20

_MAX_FRACTION = 0.85  # of the failed layout's predicted memory: changes that need more are not suggested
_UNCERTAIN = 0.03  # fraction of the measured peak from which the line shows a range: see StepPeak


class StepPeak:
    """Peak memory of one training step on a CPU, where torch counts no bytes. The measurement does not slow down
    the step.

        peak = bytes of the tensors that the engine holds before the step + peak of the bytes that the step allocates

    The first part is the sum of all storages that can be reached from the engine, taken between two steps. The
    second part comes from counters of jemalloc >= 5.3, which train.py uses if it is installed
    (pretrain/distributed/process.py): the maximum of (bytes allocated - bytes freed) of the calling thread. On a
    CPU torch runs forward pass, backward pass and optimizer in this one thread. The counters include blocks that
    operators allocate internally. Each block counts with the size class that jemalloc rounds it up to.

    A collective's thread may free a tensor last: gloo's threads hold the tensors of a collective until it is
    complete, and race with the thread that waits for it. For the counters such a tensor stays allocated. Their sum
    is known at the end of the step: what the counters say has grown, less what the engine holds in addition. The
    peak is at most that much lower.

    glibc's malloc has no such counters. Without jemalloc the sum is taken once more, after the backward pass of the
    step.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # at most; None if the allocator has no counters
        self.freed_elsewhere_bytes = 0  # by other threads, so that the peak may be lower by up to that much
        self.held_bytes: int | None = None  # between backward pass and optimizer step; None if the peak is known
        self._before_bytes: int | None = None
        self._counted_before_bytes = 0
        self._engine: DeepSpeedEngine | None = None  # during the step

    def begin(self, engine: DeepSpeedEngine) -> None:
        """Call this right before the step, in the thread that runs it."""
        self._before_bytes = held_bytes(engine)
        self._engine, self._counted_before_bytes = engine, _thread_bytes()
        if not _mallctl("thread.peak.reset", None):
            self._before_bytes = None
            call_after_backward(engine, lambda: self._record_held(engine))

    def end(self) -> None:
        """Call this after the step."""
        engine, self._engine, growth = self._engine, None, ctypes.c_uint64()
        if self._before_bytes is not None and engine is not None and _mallctl("thread.peak.read", growth):
            counted = _thread_bytes() - self._counted_before_bytes
            self.peak_bytes = self._before_bytes + growth.value
            self.freed_elsewhere_bytes = max(0, counted - (held_bytes(engine) - self._before_bytes))

    def _record_held(self, engine: DeepSpeedEngine) -> None:
        if self.held_bytes is None:
            self.held_bytes = held_bytes(engine)


def _thread_bytes() -> int:
    """Return the bytes that the calling thread has allocated, less those that it has freed; 0 without counters."""
    allocated, freed = ctypes.c_uint64(), ctypes.c_uint64()
    known = _mallctl("thread.allocated", allocated) and _mallctl("thread.deallocated", freed)
    return allocated.value - freed.value if known else 0


def _mallctl(name: str, value: ctypes.c_uint64 | None) -> bool:
    """Run a command of jemalloc, or read a value from it (jemalloc(3), MALLCTL NAMESPACE).

    Returns False if malloc is not jemalloc's, or if its version does not have the name.
    """
    try:
        mallctl = ctypes.CDLL(None).mallctl
    except (OSError, AttributeError):
        return False
    size = ctypes.c_size_t(ctypes.sizeof(ctypes.c_uint64))
    pointers = (None, None) if value is None else (ctypes.byref(value), ctypes.byref(size))
    return bool(mallctl(name.encode(), *pointers, None, ctypes.c_size_t(0)) == 0)


def held_bytes(engine: DeepSpeedEngine) -> int:
    """Return the bytes of all storages that can be reached from the engine, each counted once."""
    storages = (storage_of(tensor) for _, tensor in walk_tensors(engine))
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage is not None}.values())


@dataclass(eq=False)
class MemoryWatch(Callback):
    """Memory of this rank before the engine was built, and the measurement of one step."""

    order = 70

    plan: "Plan"
    world: World
    available_bytes: int  # for tensors, before the engine was built
    resident_at_start_bytes: int  # of this process, before the engine was built; 0 on CUDA
    step_peak: StepPeak | None = None  # measures step REPORTED_STEP; None on CUDA (torch's allocator)

    @classmethod
    def before_build(cls, plan: "Plan", world: World) -> "MemoryWatch":
        """Call this before the engine is built. On CUDA it initializes the device."""
        from deepspeed.accelerator import get_accelerator

        if get_accelerator().device_name() != "cpu":
            open_gpu(world)
            return cls(plan, world, free_gpu_bytes(_predicted_bytes(plan)), 0)

        available = max(0, _available_host_bytes(world.local_size) - PROCESS_GROWTH_BYTES)
        return cls(plan, world, available, resident_bytes()[0], StepPeak())

    @property
    def predicted(self) -> MemoryEstimate:
        """Estimate for the rank that needs the most memory. Raises ConfigError if there is none for this model."""
        return estimate_memory(self.plan.model, self.plan.layout)

    @property
    def device_kind(self) -> str:
        """The kind of device that the run uses: cpu or cuda."""
        return self.plan.layout.device_kind

    def measured_bytes(self) -> int:
        """Return this rank's peak so far: of torch's allocator on CUDA, growth of the resident set on a CPU."""
        if self.device_kind == "cuda":
            from deepspeed.accelerator import get_accelerator

            return int(get_accelerator().max_memory_allocated())
        return max(0, resident_bytes()[1] - self.resident_at_start_bytes)

    def start(self, run: Run) -> None:
        self.plan = run.plan  # it has the measured times of layers, which determine which stage holds which layers

    def before_step(self, run: Run, micro_batches: "list[MicroBatch]") -> None:
        """Begin the measurement of the step REPORTED_STEP."""
        if self.step_peak is not None and run.steps_here == REPORTED_STEP:
            self.step_peak.begin(run.engine)

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.step_peak is not None and run.steps_here == REPORTED_STEP:
            self.step_peak.end()

    def accepted(self, run: Run) -> None:
        """Report one line after the step REPORTED_STEP. Collective."""
        if run.steps_here == REPORTED_STEP:
            self._report(run.screen.line)

    def explains(self, error: BaseException) -> list[str]:
        """Describe an out-of-memory error and list changes that should fit. Returns no lines for any other error.

        Frees the memory that the frames of the error's traceback reference.
        """
        if not is_out_of_memory(error):
            return []
        measured = with_unit(self.measured_bytes())
        used = f"the process had grown by {measured}" if self.device_kind == "cpu" else \
            f"{measured} were in use before the error"
        lines = [f"out of memory{_location(error)}: {_first_line(error)}"]
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        predicted = self.predicted
        lines.append(f"predicted {with_unit(predicted.needed_bytes)} of tensors at the peak "
                     f"({sizes_by_role(predicted)}); {used}; {with_unit(self.available_bytes)} were available for "
                     "tensors")
        return lines + _changes_that_fit(self, min(self.available_bytes, int(_MAX_FRACTION * predicted.needed_bytes)))

    def _report(self, report: Callable[[str], None]) -> None:
        try:
            predicted = self.predicted
        except ConfigError as error:
            report(f"memory: {self._measurement(None)}; no prediction: {error}")
            return
        report(f"memory: {prediction_text(predicted)}; {self._measurement(predicted)}")

    def _measurement(self, predicted: MemoryEstimate | None) -> str:
        """Describe the measurement of the rank with the most memory. Every rank must call this."""
        from pretrain.distributed.collectives import gather

        if self.step_peak is None:
            from deepspeed.accelerator import get_accelerator

            devices = gather((self.measured_bytes(), int(get_accelerator().max_memory_reserved())))
            expected = f" (predicted {with_unit(predicted.reserved_bytes)})" if predicted is not None else ""
            return f"measured {with_unit(max(allocated for allocated, _ in devices))} allocated on the device, and " \
                   f"{with_unit(max(reserved for _, reserved in devices))} reserved by torch{expected}"
        ranks = gather((self.step_peak.peak_bytes, self.step_peak.held_bytes, self.step_peak.freed_elsewhere_bytes,
                        resident_bytes()[0]))
        resident = with_unit(max(resident for *_, resident in ranks))
        kernels = ", functions that oneDNN generated for each number of an expert's rows," if \
            self.plan.model.num_experts else ""
        rest = f"the process has {resident} resident, including libraries{kernels} and freed memory that it keeps"
        peaks = [(peak, peak - freed) for peak, _, freed, _ in ranks if peak is not None]
        if peaks:
            highest, lowest = max(peaks)[0], max(peak for _, peak in peaks)
            if highest - lowest <= _UNCERTAIN * highest:
                return f"measured {with_unit(highest)} of tensors; {rest}"
            return f"measured {with_unit(lowest)} to {with_unit(highest)} of tensors (threads of collectives freed " \
                   f"some, at times that are not known); {rest}"
        held = max(held or 0 for _, held, *_ in ranks)
        expected = ""
        if predicted is not None:
            steady_bytes = predicted.steady.total() - predicted.steady.total(location="nvme")
            expected = f" (predicted {with_unit(steady_bytes)} at that point)"
        return f"measured {with_unit(held)} of tensors between backward pass and optimizer step{expected}; {rest}"


def callbacks(plan: "Plan") -> list[Callback]:
    """Return the watch of this rank. It measures what is available now, before the engine is built."""
    return [MemoryWatch.before_build(plan, running_environment())]


def _predicted_bytes(plan: "Plan") -> int:
    """Return what each rank needs, or 0 if that is not known: pipeline stages differ, and not all models have it."""
    with contextlib.suppress(ConfigError):
        return estimate_memory(plan.model, plan.layout).needed_bytes if plan.layout.pipeline_stages == 1 else 0
    return 0


def _available_host_bytes(local_size: int) -> int:
    """Return this rank's part of the available host memory, at most the bytes that RLIMIT_AS still allows."""
    import psutil

    available = int(psutil.virtual_memory().available) // max(1, local_size)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    return min(available, max(0, limit - mapped))


def _changes_that_fit(watch: MemoryWatch, budget_bytes: int) -> list[str]:
    """Describe other layouts that fit into a budget. A process of its own compares them: a run does not."""
    request = {"layout": watch.plan.layout, "model": watch.plan.model, "ranks_per_node": watch.world.local_size,
               "budget_bytes": budget_bytes}
    try:
        search = subprocess.run(child_command("pretrain.extensions.memory_watch.changes_that_fit"), check=True,
                                input=pickle.dumps(request), stdout=subprocess.PIPE)
    except (OSError, subprocess.CalledProcessError) as error:
        return [f"the search for changes that fit failed: {error}. {COMPARE}"]
    return search.stdout.decode().splitlines() or [
        "no other layout of these ranks is predicted to fit: use more ranks or a smaller model"]


def _location(error: BaseException) -> str:
    """Return function, file and line of the innermost frame in this package, or "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if f"{os.sep}pretrain{os.sep}" in frame.filename]
    return f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
