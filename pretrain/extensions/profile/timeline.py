"""PipelineTimeline: records the steps of --pipeline_timeline, and writes where their time went."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.callback import Callback, Run
from pretrain.distributed.collectives import gather
from pretrain.engine.phases import new_event
from pretrain.extensions.profile.extension import ProfileSteps, parse_steps
from pretrain.extensions.profile.timeline_summary import (
    Instruction,
    RankInstructions,
    StepTimeline,
    step_timelines,
    summary_line,
    svg_of,
    text_of,
    trace_of,
)
from pretrain.paths import PROFILES_FOLDER

_CLOCK_READINGS = 9


class PipelineTimeline(Callback):
    """Records the planned steps on all ranks. Steps outside of them are not changed.

    RUN/profiles/timelineFIRST-LAST/ gets timeline.json (also for https://ui.perfetto.dev), timeline.txt, and a plot
    stepN.svg of each step.
    """

    order = 20

    def __init__(self, steps: str) -> None:
        self._steps: ProfileSteps | None = parse_steps(steps, flag="--pipeline_timeline")
        self._recorder: InstructionRecorder | None = None

    def start(self, run: Run) -> None:
        if not isinstance(run.engine, PipelineEngine):
            self._steps = None

    def begin_step(self, run: Run) -> None:
        """Begin the record before its first step, and end it before the step after its last one; then collective."""
        if self._steps is None:
            return
        if self._recorder is None and self._steps.first <= run.step <= self._steps.last:
            self._recorder = InstructionRecorder(run.engine)
        elif self._recorder is not None and not self._steps.first <= run.step <= self._steps.last:
            self.close(run)
        if self._recorder is not None:
            self._recorder.begin_step(run.step)

    def close(self, run: Run) -> None:
        """End the record, if there is one, and write it; then collective."""
        if self._recorder is None:
            return
        instructions, self._recorder, self._steps = self._recorder.stop(), None, None
        grid = run.engine.grid
        ranks = gather(RankInstructions(run.world.rank, run.engine.stage_id,
                                        (grid.get_data_parallel_rank(), grid.get_slice_parallel_rank()),
                                        tuple(instructions)))
        if run.world.rank == 0 and instructions:
            self._write(run, step_timelines(ranks))

    def _write(self, run: Run, timelines: list[StepTimeline]) -> None:
        name = f"{PROFILES_FOLDER}/timeline{timelines[0].step}-{timelines[-1].step}"
        folder = run.folder.path / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_timelines(folder, timelines)
        except OSError as error:
            run.screen.line(f"warning: {folder}: the pipeline timeline is not written ({error.strerror or error})")
            return
        run.screen.line(f"pipeline timeline in {folder}: {summary_line(timelines[-1])}")
        run.folder.event("pipeline_timeline", step=timelines[-1].step, first_step=timelines[0].step, path=name,
                         bubble=timelines[-1].bubble)


def write_timelines(folder: Path, timelines: list[StepTimeline]) -> None:
    """Write all files of the timelines into an existing folder."""
    (folder / "timeline.json").write_text(json.dumps(trace_of(timelines)) + "\n", encoding="utf-8")
    text = "\n\n".join("\n".join(text_of(timeline)) for timeline in timelines)
    (folder / "timeline.txt").write_text(text + "\n", encoding="utf-8")
    for timeline in timelines:
        (folder / f"step{timeline.step}.svg").write_text(svg_of(timeline), encoding="utf-8")


class InstructionRecorder:
    """Records the instructions of an engine from now on, until `stop`. Evaluations are not recorded.

    On a CPU the times come from the host's clock. On a device they come from events in its current stream, which
    the host does not wait for before `stop`; sends and receives end when the transfer is complete.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._step = 0
        self._engine, self._original = engine, engine._INSTRUCTION_MAP
        self._marks: list[tuple[int, str, Any, Any]] = []  # (step, name, event at the start, event at the end)
        get_accelerator().synchronize()
        self._origin_seconds, self._origin = time.perf_counter(), self._mark()
        engine._INSTRUCTION_MAP = {instruction: self._recorded(instruction.__name__, execute)
                                   for instruction, execute in self._original.items()}

    def begin_step(self, step: int) -> None:
        """Call this before each step. After a rollback, the steps that are trained again replace the earlier ones."""
        self._step = step
        self._marks = [mark for mark in self._marks if mark[0] < step]

    def stop(self) -> list[Instruction]:
        """Restore the engine. Return this rank's instructions, with times of rank 0's clock; collective."""
        self._engine._INSTRUCTION_MAP = self._original
        get_accelerator().synchronize()
        shift = self._origin_seconds - clock_offset()
        counts: dict[tuple[int, str], int] = {}
        instructions = []
        for step, name, start, end in self._marks:
            index = counts.get((step, name), 0)
            counts[step, name] = index + 1
            instructions.append(Instruction(step, name, index, shift + self._origin.elapsed_time(start) / 1e3,
                                            shift + self._origin.elapsed_time(end) / 1e3))
        return instructions

    def _recorded(self, name: str, execute: Callable[..., None]) -> Callable[..., None]:
        """Return the instruction as a function that records it. DeepSpeed binds it to the engine before each call."""
        def recorded(engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
            if not engine.module.training:
                execute(engine, *args, **kwargs)
                return
            start = self._mark()
            execute(engine, *args, **kwargs)
            self._marks.append((self._step, name, start, self._mark()))

        return recorded

    def _mark(self) -> Any:
        event = new_event()
        event.record()
        return event


def clock_offset() -> float:
    """Return by how many seconds this host's clock is ahead of rank 0's; collective.

    Processes of one host read the same clock. Between hosts, all ranks read their clocks after a barrier, several
    times; the median difference from rank 0 is off by about the time in which a barrier releases its ranks.
    """
    hosts = gather(socket.gethostname())
    if len(set(hosts)) == 1:
        return 0.0
    readings = []
    for _ in range(_CLOCK_READINGS):
        dist.barrier()
        get_accelerator().synchronize()
        readings.append(time.perf_counter())
    all_readings = gather(readings)
    own = hosts[dist.get_rank()]
    if own == hosts[0]:
        return 0.0
    first = all_readings[hosts.index(own)]  # one offset for all ranks of a host
    return median(mine - reference for mine, reference in zip(first, all_readings[0], strict=True))
