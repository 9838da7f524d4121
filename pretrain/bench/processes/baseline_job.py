"""BaselineJob: the task of one baseline, as its processes read it from their command line."""

import json
from dataclasses import dataclass
from typing import Any

from pretrain.config.flags.arguments import parse_arguments
from pretrain.config.validate import Plan, check_run
from pretrain.distributed.device import Device, cpu_device, cuda_device

LEARNING_RATE = 1e-4
THIS_PROJECT = ("project", "bare_engine", "loop", "checkpoint", "profile")  # baselines that run this project's code


@dataclass(frozen=True)
class BaselineJob:
    """Which baseline runs, with which flags, on which cores."""

    name: str  # in tables
    baseline: str  # a key of worker.BASELINES
    flags: tuple[str, ...]  # of pretrain/train.py
    device_kind: str  # cpu, cuda
    cores: tuple[tuple[int, ...], ...]  # CPU cores of each rank; its length is the number of ranks
    options: dict[str, Any]

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
