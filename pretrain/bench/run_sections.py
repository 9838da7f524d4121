"""All that was asked for, one section after another."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import Say, Section
from pretrain.bench.sections.checkpoint import checkpoint_stall
from pretrain.bench.sections.offload import offload
from pretrain.bench.sections.overhead import overhead
from pretrain.bench.sections.pipeline import STAGES, pipeline
from pretrain.bench.sections.scaling import scaling
from pretrain.bench.sections.startup import startup
from pretrain.bench.sections.step import compare
from pretrain.bench.settings import Settings

_SECTIONS: dict[str, Callable[[Workshop, Say], Section]] = {
    "step": compare, "overhead": overhead, "pipeline": pipeline, "checkpoint": checkpoint_stall, "startup": startup,
    "scaling": scaling, "offload": offload,
}


def measure(settings: Settings, say: Say, *, devices: int) -> Iterator[Section]:
    """Each section as soon as it is measured. Raises ConfigError for what can be judged before.

    Args:
        devices: GPUs, or cores of a CPU.
    """
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-bench-") as folder:
        workshop = Workshop(settings, Path(folder))
        workshop.job("judged", "project").plan()
        for what in settings.what:
            missing = _missing(what, settings, devices)
            if missing:
                yield Section(what, f"{what}: not measured; {missing}", [""], [])
                continue
            yield _SECTIONS[what](workshop, lambda text, what=what: say(f"{what}: {text}"))  # type: ignore[misc]


def _missing(what: str, settings: Settings, devices: int) -> str:
    """What this machine or command lacks for one of the sections; "": nothing."""
    if (what == "pipeline" and devices < STAGES) or (what == "scaling" and len(settings.ranks) < 2):
        return "it needs two devices, or two cores of a CPU"
    return "it needs --nvme_path" if what == "offload" and settings.nvme_path is None else ""
