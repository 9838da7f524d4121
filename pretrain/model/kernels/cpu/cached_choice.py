"""The choice for this CPU, kept in a file next to the library: later runs compute with the same variants."""

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pretrain.distributed.device import cpu_name, instruction_limits
from pretrain.model.kernels.cpu.choice import FAMILIES, KernelChoice, measure_choice, right_in_c
from pretrain.model.kernels.cpu.library import cpu_features, library_folder, library_name
from pretrain.stored_json import read_json


def fastest_choice() -> KernelChoice:
    """Return the cached choice for this CPU, torch, library, number of threads and instructions; else measure it."""
    possible = right_in_c()
    if not possible.in_c():
        return possible
    path = _path()
    cached = _read(path)
    if cached is None:
        choice, times = measure_choice(possible)
        cached = _write(path, choice, times) or choice
    return cached.both(possible)


def parse_choice(values: Any) -> KernelChoice | None:
    """Return the choice in a JSON object; None if it is not one. Families that it lacks are in C."""
    if not isinstance(values, dict) or not all(isinstance(value, bool) for value in values.values()):
        return None
    return KernelChoice(**{family: values.get(family, True) for family in FAMILIES})


def _path() -> Path:
    parts = [cpu_features(), cpu_name(), *instruction_limits(), torch.__version__, str(torch.get_num_threads()),
             library_name()]
    return library_folder() / f"ds_pretrain_choice_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> KernelChoice | None:
    """Return the choice in a file; None if the file is missing or damaged."""
    try:
        return parse_choice(read_json(path)["in_c"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, choice: KernelChoice, times: dict[str, tuple[float, float]]) -> KernelChoice | None:
    """Write the file, unless another process has written it since: return that one's choice. A full disk is ignored."""
    content = {"in_c": asdict(choice), "cpu": cpu_name(), "torch": torch.__version__,
               "threads": torch.get_num_threads(), "library": library_name(),
               "milliseconds_in_c_and_torch": {family: [round(value, 4) for value in pair]
                                               for family, pair in times.items()}}
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1))
        file.flush()
        os.fchmod(file.fileno(), 0o644)  # several users may share the folder
        try:
            os.link(file.name, path)
        except FileExistsError:
            if (other := _read(path)) is not None:
                return other
            path.unlink()  # damaged
            os.link(file.name, path)
    return None
