"""Report hints while a run trains, on rank 0."""

from collections.abc import Mapping
from typing import Any

from pretrain.callback import Callback, Run
from pretrain.monitor.hints.hint_log import HintLog


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
