"""Hints about the curve of a run: faults that it shows, with a remedy. Each is reported once, also in a resumed run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.callback import Callback, Run
from pretrain.extension import Extension

if TYPE_CHECKING:
    from pretrain.monitor.curve import Hint

_EACH_ROW = 20  # first rows that the rules look at one by one; later they look when there are 10% more


class ReportHints(Callback):
    """Reports each hint once, in a line and an event."""

    def start(self, run: Run) -> None:
        self._log = HintLog(run.folder.path, first_step=run.first_step) if run.world.rank == 0 else None

    def rolled_back(self, run: Run) -> None:
        if self._log is not None:
            self._log.return_to(run.step)

    def after_row(self, run: Run, row: Mapping[str, Any]) -> None:
        for hint in self._log.observe(row) if self._log is not None else ():
            run.screen.line(f"hint: {hint}")
            run.event("hint", reason=str(hint), name=hint.name)


class HintLog:
    """The curve of a run, and the hints that were reported. Exists on rank 0 only.

    Args:
        run: the run folder, whose earlier rows and hints count if the run is resumed.
        first_step: number of steps that were done before.
    """

    def __init__(self, run: Path, *, first_step: int) -> None:
        from pretrain.monitor.curve import CurveLog
        from pretrain.monitor.read_run_folder import read_events

        self._rows, self._next = CurveLog(run, first_step=first_step), 0  # number of rows at which the rules look again
        self._reported = {str(event.get("name")) for event in read_events(run) if event["event"] == "hint"} \
            if first_step else set()

    def return_to(self, step: int) -> None:
        """Forget the rows of later steps, because the run has returned to `step`."""
        self._rows.return_to(step)
        self._next = 0

    def observe(self, row: Mapping[str, Any]) -> "list[Hint]":
        """Add a row of training or of an evaluation. Returns the hints that were not reported before.

        A look at 1,000 rows takes 3 ms (2026-11-24, 2 cores of an Intel Xeon), and nothing waits for the device.
        """
        from pretrain.extensions.hints.rules import find_hints

        self._rows.add(row)
        if "loss" in row and len(self._rows) < self._next:
            return []
        self._next = int(1.1 * len(self._rows)) if len(self._rows) > _EACH_ROW else 0
        hints = [hint for hint in find_hints(self._rows.curve(), self._rows.facts())
                 if hint.name not in self._reported]
        self._reported.update(hint.name for hint in hints)
        return hints


EXTENSION = Extension(
    "hints", "Names faults that the curve of a run shows, with a remedy.", callbacks=lambda plan: [ReportHints()],
    hints="rules:find_hints",
    events={"hint": ("name", "the curve shows a fault of this kind for the first time; also on the terminal")})
