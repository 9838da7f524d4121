"""--what data: the speed of the preparation and of the reading of training data, next to other implementations."""

from collections.abc import Callable

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.sections.data.figures import DataBench, DataFigure
from pretrain.bench.sections.data.loading import loading
from pretrain.bench.sections.data.opening import opening
from pretrain.bench.sections.data.preparing import preparing
from pretrain.bench.sections.data.tokenizing import tokenizing
from pretrain.bench.sections.data.waiting import waiting
from pretrain.bench.sections.section import BenchSection, ReportProgress


def _documents(bench: DataBench) -> list[DataFigure]:
    from pretrain.bench.sections.data.documents import documents  # imports torch

    return documents(bench)


_MEASURE: dict[str, Callable[[DataBench], list[DataFigure]]] = {
    "tokenizing": tokenizing, "preparing": preparing, "loading": loading, "opening": opening, "waiting": waiting,
    "documents": _documents}


def data(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Run the measurements one after another. One that fails is reported, and the others continue."""
    bench = DataBench(context.folder / "data", context.settings.repetitions)
    bench.folder.mkdir()
    figures, failures = [], []
    for name, measure in _MEASURE.items():
        report(name)
        try:
            figures += measure(bench)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    notes = ["Ratio: how many times better than the baseline. CPU time of one process, the best of "
             f"{bench.repetitions} interleaved repetitions.",
             *dict.fromkeys(figure.note for figure in figures if figure.note)]
    values = {figure.name: {"ours": figure.ours, "baseline": figure.baseline, "unit": figure.unit,
                            "baseline_name": figure.baseline_name, "ratio": figure.ratio} for figure in figures}
    return BenchSection("data", "Training data", ["", "this project", "baseline", "which", "ratio"],
                        [figure.row() for figure in figures], notes, failures, {"figures": values})
