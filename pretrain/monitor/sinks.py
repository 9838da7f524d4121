"""DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet) and Trackio get the values of metrics.jsonl."""

import contextlib
import io
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from pretrain.engine.patches.monitors import SurvivingMonitor, take_monitors, write_note
from pretrain.errors import escape_controls

_NAMES = {"loss": "train_loss"}  # DeepSpeed's name
_NOT_SENT = ("consumed_samples", "time")  # the x-axis; the monitors record the time themselves

Event = tuple[str, float, int]
"""(name, value, consumed samples), as DeepSpeed's monitors take it"""


class Sinks:
    """Writes each row of metrics.jsonl to the monitors that the DeepSpeed JSON and --trackio select, on rank 0.

    The monitors that have a place for text also get --note, at the start.
    """

    def __init__(self, engine: DeepSpeedEngine, *, rank: int, run: Path, trackio: str | None, note: str,
                 first_step: int) -> None:
        monitors, note = take_monitors(engine), escape_controls(note)
        self._monitors: list[Any] = [monitors] if monitors.enabled and rank == 0 else []
        self._trackio = SurvivingMonitor(lambda: TrackioMonitor(trackio, run, note), "trackio") \
            if trackio is not None and rank == 0 else None
        if self._trackio is not None:
            self._monitors.append(self._trackio)
        if note and rank == 0:
            write_note(monitors, note, first_step)

    def write(self, row: dict[str, Any]) -> None:
        for monitor in self._monitors:
            monitor.write_events(events_of(row))

    def close(self) -> None:
        if self._trackio is not None:
            self._trackio.finish()


def events_of(row: dict[str, Any]) -> list[Event]:
    """Return an event for each number of a row. Its x is the number of consumed samples.

    Like metrics.jsonl, which has null for them, the monitors get no NaN and no infinity.
    """
    samples = row["consumed_samples"]
    if "eval_loss" in row:
        names = {"eval_loss": f"Evaluation/{row['split']}_loss", "eval_ppl": f"Evaluation/{row['split']}_ppl"}
    elif "split" in row:  # of an extension
        names = {key: f"Evaluation/{row['split']}_{key}" for key in row if key not in (*_NOT_SENT, "step", "split")}
    else:
        names = {key: f"Train/Samples/{_NAMES.get(key, key)}" for key in row if key not in _NOT_SENT}
    return [(name, row[key], samples) for key, name in names.items()
            if isinstance(row[key], (int, float)) and math.isfinite(row[key])]


class TrackioMonitor:
    """Writes events to a project of Trackio, which is no monitor of DeepSpeed. A run that resumes continues its curves.

    Args:
        project: name of the project.
        run: run folder; the name of its last part is the run's.
        note: a text for the run's configuration, or "".
    """

    def __init__(self, project: str, run: Path, note: str) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open its dashboard
            self._run: Any = trackio.init(project=project, name=run.absolute().name, resume="allow", embed=False,
                                          auto_log_gpu=False, auto_log_cpu=False,
                                          config={"note": note} if note else None)

    def write_events(self, events: list[Event]) -> None:
        values: dict[int, dict[str, float]] = defaultdict(dict)
        for name, value, samples in events:
            values[samples][name] = value
        for samples, row in values.items():
            self._run.log(row, step=samples)

    def finish(self) -> None:
        """Wait until everything is written."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self._run.finish()
