"""Report that the loss leaves the expected curve of --expected_curve, or returns to it, on rank 0."""

from collections.abc import Mapping
from typing import Any

from pretrain.callback import Callback, Run
from pretrain.config.expected_curve import Target
from pretrain.monitor.curve import CurveLog
from pretrain.monitor.expected.causes import Evidence, likely_causes
from pretrain.monitor.expected.curve_watch import OFF_CURVE, ON_CURVE, Change, CurveWatch
from pretrain.monitor.read_run_folder import read_events


class ReportCurve(Callback):
    """Compares each row with the curve, and reports changes with likely causes."""

    order = 55  # after the hints

    def __init__(self, expected: Target) -> None:
        self._expected = expected

    def start(self, run: Run) -> None:
        args = run.plan.args
        self._watch = CurveWatch(run.folder.path, self._expected, first_step=run.first_step, seq_length=args.seq_length,
                                 first_tokens=args.first_sample * args.seq_length) if run.world.rank == 0 else None

    def rolled_back(self, run: Run) -> None:
        if self._watch is not None:
            self._watch.return_to(run.step)

    def after_row(self, run: Run, row: Mapping[str, Any]) -> None:
        change = self._watch.observe(row) if self._watch is not None else None
        if change is None:
            return
        if change.event == ON_CURVE:
            run.screen.line(f"{change.event}: {change}")
            run.folder.event(ON_CURVE, reason=str(change), **change.record())
            return
        causes = self._causes(run, change)
        run.screen.line(f"{change.event}: {change}; likely causes, in the order of the sanity checks: "
                        f"{'; '.join(causes)}")
        run.folder.event(OFF_CURVE, reason=str(change), causes=causes, **change.record())

    def _causes(self, run: Run, change: Change) -> list[str]:
        """Return the likely causes of a loss that is off the curve."""
        log = CurveLog(run.folder.path, first_step=run.step)  # of the rows that are written
        return likely_causes(Evidence(change, log.curve(), log.facts(), self._expected, read_events(run.folder.path)))
