"""Helpers: watch the data of a run, and collect what is written."""

from pretrain.callback import Run
from pretrain.checkpoint.load.start import Start
from pretrain.extensions.data_watch.watch import DataWatch
from tests.support.callback_runs import run_of


class Lines:
    """Stands for the screen and the run folder of a run, and collects what is written."""

    run: Run

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def event(self, kind: str, **_: object) -> None:
        self.lines.append(kind)


def watch_data(start: Start) -> tuple[DataWatch, Lines, list[str]]:
    """Watch the data of a run. Return the lines and the rejections that this writes, too."""
    output, rejections = Lines(), list[str]()
    watch = DataWatch()
    output.run = run_of(start.plan, folder=output, screen=output, reject=rejections.append)
    output.run.step, output.run.resume = 1, start.resume
    watch.start(output.run)
    return watch, output, rejections
