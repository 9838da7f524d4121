"""Fake packages of W&B and Comet, which need accounts, and of Trackio, which is large. They record what they get."""

import importlib.machinery
import sys
import types
from typing import Any

Sent = dict[str, list[tuple[str, Any, int]]]
"""service -> (name, value, x) of each point, and ("note", text, 0)"""


def install_fake_services() -> Sent:
    """Make `import wandb` and `import comet_ml` return packages that record. Returns the record, empty at first."""
    sent: Sent = {"wandb": [], "comet": [], "trackio": []}

    def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        del commit
        sent["wandb"] += [(name, value, step or 0) for name, value in data.items()]

    class WandbRun:
        def __setattr__(self, name: str, value: str) -> None:
            sent["wandb"].append((name, value, 0))

    class Experiment:
        def log_other(self, name: str, value: str) -> None:
            sent["comet"].append((name, value, 0))

        def __internal_api__log_metric__(self, name: str, value: float, step: int) -> None:
            sent["comet"].append((name, value, step))

    class Run:
        def __init__(self, config: dict[str, str] | None) -> None:
            self.points: list[tuple[str, Any, int]] = [(name, text, 0) for name, text in (config or {}).items()]

        def log(self, row: dict[str, Any], step: int) -> None:
            self.points += [(name, value, step) for name, value in row.items()]

        def finish(self) -> None:
            sent["trackio"] += self.points

    _install("trackio", init=lambda config, **_: Run(config))
    _install("wandb", init=lambda **_: None, log=log, run=WandbRun())
    _install("comet_ml", __version__="3.50.0", start=lambda **_: Experiment())
    return sent


def _install(name: str, **content: Any) -> None:
    package = types.ModuleType(name)
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)  # the check of a run looks for it
    vars(package).update(content)
    sys.modules[name] = package
