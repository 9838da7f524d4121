"""PipelineTimeline: records the steps of --pipeline_timeline, and writes where their time went."""

import json
from collections.abc import Callable
from pathlib import Path

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.config.profiles import parse_steps
from pretrain.config.validate import Plan
from pretrain.distributed.collectives import gather
from pretrain.engine.measure.pipeline_timeline import InstructionRecorder
from pretrain.monitor.timeline_files import summary_line, svg_of, text_of, trace_of
from pretrain.monitor.timeline_summary import RankInstructions, StepTimeline, step_timelines
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.paths import PROFILES_FOLDER


class PipelineTimeline:
    """Records the planned steps on all ranks. Steps outside of them are not changed.

    RUN/profiles/timelineFIRST-LAST/ gets timeline.json (also for https://ui.perfetto.dev), timeline.txt, and a plot
    stepN.svg of each step.

    Args:
        report: prints a line on rank 0.
    """

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, folder: RunFolder, *, rank: int,
                 report: Callable[[str], None]) -> None:
        steps = parse_steps(plan.args.pipeline_timeline, flag="--pipeline_timeline") \
            if plan.args.pipeline_timeline else None
        self._steps = steps if isinstance(engine, PipelineEngine) else None
        self._engine, self._folder, self._rank, self._report = engine, folder, rank, report
        self._recorder: InstructionRecorder | None = None

    def before_step(self, step: int) -> None:
        """Begin the record before its first step, and end it before the step after its last one; then collective."""
        if self._steps is None:
            return
        if self._recorder is None and self._steps.first <= step <= self._steps.last:
            self._recorder = InstructionRecorder(self._engine)
        elif self._recorder is not None and not self._steps.first <= step <= self._steps.last:
            self.close()
        if self._recorder is not None:
            self._recorder.begin_step(step)

    def close(self) -> None:
        """End the record, if there is one, and write it; then collective."""
        if self._recorder is None:
            return
        instructions, self._recorder, self._steps = self._recorder.stop(), None, None
        grid = self._engine.grid
        ranks = gather(RankInstructions(self._rank, self._engine.stage_id,
                                        (grid.get_data_parallel_rank(), grid.get_slice_parallel_rank()),
                                        tuple(instructions)))
        if self._rank == 0 and instructions:
            self._write(step_timelines(ranks))

    def _write(self, timelines: list[StepTimeline]) -> None:
        name = f"{PROFILES_FOLDER}/timeline{timelines[0].step}-{timelines[-1].step}"
        folder = self._folder.path / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_timelines(folder, timelines)
        except OSError as error:
            self._report(f"warning: {folder}: the pipeline timeline is not written ({error.strerror or error})")
            return
        self._report(f"pipeline timeline in {folder}: {summary_line(timelines[-1])}")
        self._folder.event("pipeline_timeline", step=timelines[-1].step, first_step=timelines[0].step, path=name,
                           bubble=timelines[-1].bubble)


def write_timelines(folder: Path, timelines: list[StepTimeline]) -> None:
    """Write all files of the timelines into an existing folder."""
    (folder / "timeline.json").write_text(json.dumps(trace_of(timelines)) + "\n", encoding="utf-8")
    text = "\n\n".join("\n".join(text_of(timeline)) for timeline in timelines)
    (folder / "timeline.txt").write_text(text + "\n", encoding="utf-8")
    for timeline in timelines:
        (folder / f"step{timeline.step}.svg").write_text(svg_of(timeline), encoding="utf-8")
