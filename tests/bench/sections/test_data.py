"""--what data: the figures, and the measurements with little data. The tests check what is compared, but no speeds."""

import time
from pathlib import Path

import pytest

from pretrain.bench.sections.data.figures import DataBench, DataFigure, least_cpu_seconds
from pretrain.bench.sections.data.loading import loading
from pretrain.bench.sections.data.opening import opening
from pretrain.bench.sections.data.tokenizing import tokenizing
from pretrain.bench.sections.data.waiting import waiting


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


def test_tokenizing(tmp_path: Path) -> None:
    figures = tokenizing(DataBench(tmp_path, repetitions=1, scale=0.05))
    assert [figure.name.split(", ")[1] for figure in figures] == ["SentencePiece BPE", "Hugging Face BPE"]
    assert all(figure.ours > 0 and figure.baseline > 0 for figure in figures)


def test_loading(tmp_path: Path) -> None:
    figures = loading(DataBench(tmp_path, repetitions=1, scale=0.02))
    assert [figure.unit for figure in figures] == ["samples/s", "ms", "ms"]
    assert all(figure.ours > 0 and figure.baseline > 0 for figure in figures)


def test_opening(tmp_path: Path) -> None:
    figures = opening(DataBench(tmp_path, repetitions=1, scale=0.01))
    assert [figure.name for figure in figures] == [
        "open 0.5 M documents", "open 0.5 M documents: memory", "open 10 M documents, read sample 10^9",
        "open 10 M documents, read sample 10^9: memory"]
    assert all(figure.ours > 0 and figure.baseline > 0 for figure in figures)


def test_waiting(tmp_path: Path) -> None:
    [figure] = waiting(DataBench(tmp_path, repetitions=1, scale=0.01))
    assert 0 < figure.ours < 100
    assert figure.baseline > 0
