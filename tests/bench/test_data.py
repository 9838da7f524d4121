"""--what data: the figures, and the measurements with little data. The tests check what is compared, but no speeds."""

import time
from pathlib import Path

import pytest

from pretrain.bench.data import DataBench, DataFigure, least_cpu_seconds, loading, preparing


def test_ratio_is_above_1_if_this_project_is_better() -> None:
    assert DataFigure("speed", 3.0, 2.0, "M tokens/s", "loop").ratio == 1.5
    assert DataFigure("time", 2.0, 3.0, "s", "loop", higher_is_better=False).ratio == 1.5


def test_functions_are_called_in_turn_and_the_least_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is replaced: it gives the times before and after each call."""
    clock = iter([0.0, 3.0, 3.0, 9.0, 9.0, 10.0, 10.0, 15.0, 15.0, 17.0, 17.0, 24.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    calls: list[str] = []
    seconds = least_cpu_seconds([lambda: calls.append("ours"), lambda: calls.append("baseline")], 3)
    assert calls == ["ours", "baseline"] * 3
    assert seconds == [1.0, 5.0]


def test_measurements_with_little_data(tmp_path: Path) -> None:
    bench = DataBench(tmp_path, repetitions=1, scale=0.02)
    figures = [figure for measure in (preparing, loading) for figure in measure(bench)]
    assert [figure.unit for figure in figures] == ["MB/s", "MB/s", "MB/s", "MiB", "samples/s", "ms"]
    assert all(figure.ours > 0 and figure.baseline > 0 for figure in figures)
