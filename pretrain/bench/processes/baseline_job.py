"""BaselineJob: what the processes of one baseline have to do. They read it as JSON from their command line."""

import json
from dataclasses import dataclass
from typing import Any

from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import Plan, check_run
from pretrain.distributed.device import Device, cpu_device, cuda_device

LEARNING_RATE = 1e-4
# baselines that run this project's code
PROJECT_BASELINES = ("project", "bare_engine", "loop", "guarded_loop", "two_schedules", "checkpoint", "profile")


@dataclass(frozen=True)
class BaselineJob:
    """Which baseline runs, with which flags, on which cores."""

    name: str  # as tables show it
    baseline: str  # a key of worker.MAIN_FUNCTIONS
    flags: tuple[str, ...]  # flags of pretrain/train.py
    device_kind: str  # "cpu" or "cuda"
    cores: tuple[tuple[int, ...], ...]  # CPU cores of each rank; its length is the number of ranks
    options: dict[str, Any]  # further values for the baseline's main function

    @property
    def device(self) -> Device:
        return cpu_device() if self.device_kind == "cpu" else cuda_device()

    def option(self, name: str) -> Any:
        return self.options[name]

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "BaselineJob":
        values = json.loads(text)
        return cls(**{**values, "flags": tuple(values["flags"]), "cores": tuple(map(tuple, values["cores"]))})

    def plan(self) -> Plan:
        """Return the run that the flags describe, validated as by train.py. Raises ConfigError."""
        return check_run(parse_arguments(list(self.flags)), world_size=len(self.cores), device=self.device)
