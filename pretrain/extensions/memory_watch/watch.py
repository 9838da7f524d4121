"""Measure the memory of a run, and report it next to the prediction; name changes that fit if it was not enough."""

import contextlib
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

from pretrain.callback import Callback, Run, StepResult
from pretrain.child import child_command
from pretrain.distributed.own_gpu import free_gpu_bytes, open_gpu
from pretrain.distributed.process import is_out_of_memory, resident_bytes
from pretrain.distributed.world import World
from pretrain.errors import ConfigError
from pretrain.memory.estimate.estimate_memory import MemoryEstimate, estimate_memory
from pretrain.memory.footprint import with_unit
from pretrain.memory.plan_remarks import COMPARE, prediction_text, sizes_by_role

if TYPE_CHECKING:
    from pretrain.config.plan import Plan
    from pretrain.data.loader import MicroBatch
    from pretrain.extensions.memory_watch.step_peak import StepPeak

REPORTED_STEP = 2  # counted from the start of this process: the first step allocates the optimizer states
# Growth of a CPU process from its start to the end of a step, without its tensors: library code that is loaded into
# memory, DeepSpeed's shared memory for collectives (66 MiB a rank), oneDNN's kernels, and freed memory that the
# allocator keeps. Measured: 30 to 213 MiB with models of 0.3 to 25 M parameters.
PROCESS_GROWTH_BYTES = 256 * 2**20

_MAX_FRACTION = 0.85  # of the failed layout's predicted memory: changes that need more are not suggested
_UNCERTAIN = 0.03  # fraction of the measured peak from which the line shows a range: see StepPeak


@dataclass(eq=False)
class MemoryWatch(Callback):
    """Memory of this rank before the engine was built, and the measurement of one step."""

    order = 70

    plan: "Plan"
    world: World
    available_bytes: int  # for tensors, before the engine was built
    resident_at_start_bytes: int  # of this process, before the engine was built; 0 on CUDA
    step_peak: "StepPeak | None" = None  # measures step REPORTED_STEP; None on CUDA (torch's allocator)

    @classmethod
    def before_build(cls, plan: "Plan", world: World) -> "MemoryWatch":
        """Call this before the engine is built. On CUDA it initializes the device."""
        from deepspeed.accelerator import get_accelerator

        if get_accelerator().device_name() != "cpu":
            open_gpu(world)
            return cls(plan, world, free_gpu_bytes(_predicted_bytes(plan)), 0)
        from pretrain.extensions.memory_watch.step_peak import StepPeak

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
