"""Measure the chosen sections, one after another."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.bench.checkpoints import checkpoint
from pretrain.bench.data import data
from pretrain.bench.processes import BenchContext, ReportProgress
from pretrain.bench.profile import profile
from pretrain.bench.report import BenchSection
from pretrain.bench.settings import BenchSettings
from pretrain.bench.startup import startup
from pretrain.bench.training import STAGES, overhead, pipeline, recompute, scaling, training_step

_MEASURE: dict[str, Callable[[BenchContext, ReportProgress], BenchSection]] = {
    "step": training_step, "profile": profile, "overhead": overhead, "pipeline": pipeline, "checkpoint": checkpoint,
    "startup": startup, "scaling": scaling, "recompute": recompute, "data": data,
}


def run_sections(settings: BenchSettings, report: ReportProgress, *, devices: int) -> Iterator[BenchSection]:
    """Yield each section as soon as it is measured. Raises ConfigError before the first measurement.

    Args:
        devices: number of GPUs, or on a CPU the number of cores.
    """
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-bench-") as folder:
        context = BenchContext(settings, Path(folder))
        context.job("validated", "project.project").plan()  # raises ConfigError
        for name in settings.sections:
            missing = _missing(name, settings, devices)
            if missing:
                yield BenchSection(name, f"{name}: not measured, because {missing}", [""], [])
                continue
            yield _MEASURE[name](context, lambda text, name=name: report(f"{name}: {text}"))  # type: ignore[misc]


def _missing(name: str, settings: BenchSettings, devices: int) -> str:
    """Return why a section cannot be measured on this machine or with these flags; "" if it can."""
    if (name == "pipeline" and devices < STAGES) or (name == "scaling" and len(settings.rank_counts) < 2):
        return "it needs two GPUs, or two cores of a CPU"
    return ""
