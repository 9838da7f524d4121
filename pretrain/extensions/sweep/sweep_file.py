"""The YAML of a sweep: the settings that all runs share, and the space of those that differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.flags.arguments import FLAGS
from pretrain.config.flags.parse import yaml_problem
from pretrain.errors import ConfigError, file_errors, shorten

_SET_HERE = ("save", "local_rank", "resume", "resume_from", "extension")
_RANGE_KEYS = ("low", "high", "log", "step")
_LARGEST = 10_000
_TYPES = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "a mapping"}


@dataclass(frozen=True)
class Dimension:
    """Values of a flag: choices, or a range of numbers."""

    flag: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: int | float | None = None

    @property
    def is_whole(self) -> bool:
        """True for a range of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class SweepFile:
    """The content of a sweep's YAML."""

    path: str
    config: str  # YAML of the runs
    folder: Path
    runs: int
    space: tuple[Dimension, ...]
    flags: Mapping[str, Any]  # that all runs have, besides those of `config`
    sampler: str = "tpe"  # or "random"
    seed: int = 0
    prune: bool = True
    metric: str = "valid"  # the evaluated dataset
    ranks: int = 1
    parallel: int = 1
    devices: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES of each run at a time


def read_sweep(path: str) -> SweepFile:
    """Read and check the YAML. Raises ConfigError, with the file and the key."""
    with file_errors(path, "the file cannot be read: {}", kinds=(OSError, UnicodeDecodeError)):
        text = Path(path).read_text(encoding="utf-8")
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(path, problem=f"it is not YAML: {shorten(yaml_problem(error))}") from None
    if not isinstance(values, dict):
        raise ConfigError(path, found=type(values).__name__, expected="a mapping with config, folder, runs and space")
    known = ("config", "folder", "runs", "space", "flags", "sampler", "seed", "prune", "metric", "ranks", "parallel",
             "devices")
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: {shorten(str(key))}", found="an unknown key", expected=", ".join(known),
                              word=str(key), known=known)
    read = _Reader(path, values)
    devices = tuple(str(each) for each in read.value("devices", list, []))
    parallel = read.whole("parallel", len(devices) or 1)
    if devices and parallel > len(devices):
        raise ConfigError(f"{path}: parallel", found=parallel,
                          expected=f"at most {len(devices)}, the number of devices")
    return SweepFile(
        path, read.value("config", str), Path(read.value("folder", str)), read.whole("runs"), _space(read),
        _flags(read), read.choice("sampler", ("tpe", "random")), read.whole("seed", 0, low=0),
        read.value("prune", bool, True), read.value("metric", str, "valid"), read.whole("ranks", 1), parallel, devices)


@dataclass(frozen=True)
class _Reader:
    path: str
    values: dict[str, Any]

    def value(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """Return a value of this type. Raises ConfigError for another one, and if a required key is missing."""
        found = self.values.get(key, default)
        if found is None:
            raise ConfigError(f"{self.path}: {key}", problem="the key is missing")
        if not isinstance(found, kind) or (kind is not bool and isinstance(found, bool)) or found == "":
            raise ConfigError(f"{self.path}: {key}", found=shorten(repr(found)), expected=_TYPES[kind])
        return found

    def whole(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """Return a whole number from `low`."""
        found = self.value(key, int, default)
        if not low <= found <= (_LARGEST if low else 2**32 - 1):
            raise ConfigError(f"{self.path}: {key}", found=found, expected=f"a whole number from {low}" +
                              (f" to {_LARGEST}" if low else ""))
        return int(found)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Return one of these words; the first one is the default."""
        found = self.value(key, str, choices[0])
        if found not in choices:
            raise ConfigError(f"{self.path}: {key}", found=found, expected=", ".join(choices), word=found,
                              known=choices)
        return str(found)


def _check_flag(where: str, name: object) -> str:
    if not isinstance(name, str) or name not in FLAGS:
        raise ConfigError(where, found="an unknown key", expected="a flag of `ds-pretrain train`", word=str(name),
                          known=FLAGS)
    if name in _SET_HERE:
        raise ConfigError(where, problem="the sweep sets this flag", remedy="remove the key")
    return name


def _flags(read: _Reader) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in read.value("flags", dict, {}).items():
        where = f"{read.path}: flags.{shorten(str(name))}"
        if isinstance(value, dict) and name != "model_overrides":
            raise ConfigError(where, found="a mapping", expected="a single value, or a list of them")
        found[_check_flag(where, name)] = value
    return found


def _space(read: _Reader) -> tuple[Dimension, ...]:
    space = read.value("space", dict)
    if not space:
        raise ConfigError(f"{read.path}: space", found="nothing", expected="at least one flag with its values")
    return tuple(_dimension(f"{read.path}: space.{shorten(str(name))}", name, value) for name, value in space.items())


def _dimension(where: str, name: Any, value: Any) -> Dimension:
    flag = _check_flag(where, name)
    if isinstance(value, list):
        if not value or any(isinstance(each, (list, dict)) or each is None for each in value):
            raise ConfigError(where, found=shorten(repr(value)), expected="a list of numbers, texts or true and false")
        return Dimension(flag, choices=tuple(value))
    if not isinstance(value, dict) or not {"low", "high"} <= value.keys() <= {*_RANGE_KEYS}:
        raise ConfigError(where, found=shorten(repr(value)), expected="a list of choices, or {low: NUMBER, high: "
                          "NUMBER}, with log: true or a step if wanted")
    low: Any = value["low"]
    high: Any = value["high"]
    log, step = value.get("log"), value.get("step")
    for key, number in (("low", low), ("high", high), ("step", step)):
        if (key != "step" or number is not None) and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise ConfigError(f"{where}.{key}", found=shorten(repr(number)), expected="a number, with a point if it "
                              "has an exponent: 1.0e-4")
    if not isinstance(log, (bool, type(None))) or (log and step is not None):
        raise ConfigError(f"{where}.log", found=shorten(repr(log)), expected="true or false, and no step with true")
    if not low < high or (log and low <= 0):
        raise ConfigError(where, found=f"low {low}, high {high}", expected="low below high" +
                          (", and above 0 with log" if log else ""))
    if step is not None and not 0 < step <= high - low:
        raise ConfigError(f"{where}.step", found=step, expected=f"above 0 and at most {high - low:g}")
    return Dimension(flag, (), low, high, bool(log), step)
