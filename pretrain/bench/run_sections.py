"""Measure the chosen sections, one after another."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.sections.checkpoint import checkpoint_rates
from pretrain.bench.sections.data.data import data
from pretrain.bench.sections.guards import RANKS, guards
from pretrain.bench.sections.host import host
from pretrain.bench.sections.offload import offload
from pretrain.bench.sections.overhead import overhead
from pretrain.bench.sections.pipeline import STAGES, pipeline
from pretrain.bench.sections.profile import profile
from pretrain.bench.sections.recompute import recompute
from pretrain.bench.sections.scaling import scaling
from pretrain.bench.sections.schedule import schedule
from pretrain.bench.sections.section import BenchSection, ReportProgress
from pretrain.bench.sections.startup import startup
from pretrain.bench.sections.step import training_step
from pretrain.bench.settings import BenchSettings

_MEASURE: dict[str, Callable[[BenchContext, ReportProgress], BenchSection]] = {
    "step": training_step, "overhead": overhead, "guards": guards, "pipeline": pipeline, "checkpoint": checkpoint_rates,
    "startup": startup, "scaling": scaling, "host": host, "offload": offload, "schedule": schedule,
    "recompute": recompute, "data": data, "profile": profile,
}


def run_sections(settings: BenchSettings, report: ReportProgress, *, devices: int) -> Iterator[BenchSection]:
    """Yield each section as soon as it is measured. Raises ConfigError before the first measurement.

    Args:
        devices: number of GPUs, or on a CPU the number of cores.
    """
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-bench-") as folder:
        context = BenchContext(settings, Path(folder))
        context.job("validated", "project").plan()  # raises ConfigError
        for name in settings.sections:
            missing = _missing(name, settings, devices)
            if missing:
                yield BenchSection(name, f"{name}: not measured, because {missing}", [""], [])
                continue
            yield _MEASURE[name](context, lambda text, name=name: report(f"{name}: {text}"))  # type: ignore[misc]


def _missing(name: str, settings: BenchSettings, devices: int) -> str:
    """Return why a section cannot be measured on this machine or with these flags; "" if it can."""
    too_few = (name in ("pipeline", "schedule") and devices < STAGES) or (name == "guards" and devices < RANKS)
    if too_few or (name == "scaling" and len(settings.rank_counts) < 2):
        return "it needs two GPUs, or two cores of a CPU"
    return "it needs --nvme_path" if name == "offload" and settings.nvme_path is None else ""
