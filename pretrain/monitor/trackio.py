"""A monitor for Trackio, which DeepSpeed does not have."""

import contextlib
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = tuple[str, float, int]
"""(name, value, consumed samples), as DeepSpeed's monitors take it"""


class TrackioMonitor:
    """Writes events to a Trackio project. A run that resumes continues its curves.

    Args:
        project: name of the project.
        run: run folder; the name of its last part is that of the run.
    """

    def __init__(self, project: str, run: Path) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open its dashboard
            self._run: Any = trackio.init(project=project, name=run.absolute().name, resume="allow", embed=False,
                                          auto_log_gpu=False, auto_log_cpu=False)

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
