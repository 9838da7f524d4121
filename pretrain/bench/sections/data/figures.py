"""Figures of --what data: a value of this project next to a baseline that was measured in the same run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DataBench:
    """Temporary folder, repetitions and amount of data of the measurements."""

    folder: Path
    """temporary folder for the files that are measured"""
    repetitions: int
    """--rounds: interleaved repetitions of each function"""
    scale: float = 1.0
    """fraction of the usual amount of data; tests use less"""


@dataclass(frozen=True)
class DataFigure:
    """A value of this project, and that of the baseline, in the same unit."""

    name: str
    ours: float
    baseline: float
    unit: str
    baseline_name: str
    higher_is_better: bool = True
    note: str = ""
    """how it was measured, printed below the table"""

    @property
    def ratio(self) -> float:
        """Return how many times better than the baseline this project is; infinite if nothing was measurable."""
        better, worse = (self.ours, self.baseline) if self.higher_is_better else (self.baseline, self.ours)
        return better / worse if worse else float("inf")

    def row(self) -> list[str]:
        """Return the row of the table."""
        return [self.name, f"{self.ours:,.4g} {self.unit}", f"{self.baseline:,.4g} {self.unit}", self.baseline_name,
                f"{self.ratio:.2f}"]


def least_cpu_seconds(functions: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """Call the functions in turn, `repetitions` times, and return the least CPU time of each one.

    CPU time of all threads of this process: other processes of a busy machine change it less than the elapsed time.
    """
    least = [float("inf")] * len(functions)
    for _ in range(repetitions):
        for number, function in enumerate(functions):
            start = time.process_time()
            function()
            least[number] = min(least[number], time.process_time() - start)
    return least
