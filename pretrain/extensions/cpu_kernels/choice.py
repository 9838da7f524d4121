"""Which families of operators are computed in C on this CPU, and which by torch.

A run makes the choice once, at its start, for all ranks (`choose`), because the variants differ in the last bits of
their results. Processes that make no choice use each family in C whose results are right on this CPU. The choice is
kept in a file next to the library, so that later runs compute with the same variants.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.distributed.collectives import gather
from pretrain.distributed.device import cpu_features, cpu_name, instruction_limits
from pretrain.extensions.cpu_kernels.c_functions import has_inner_product
from pretrain.extensions.cpu_kernels.library import has_library, is_real, library_folder, library_name
from pretrain.extensions.cpu_kernels.trials import TRIALS, is_right, times_ms
from pretrain.stored_json import read_json

_MARGIN = 0.95  # torch's operators are chosen if they take less than this fraction of the time in C
FAMILIES = ("activation", "linear", "linear_fp32", "norm", "attention", "attention_fp32", "loss", "optimizer")
KernelChoice = frozenset[str]  # the families of operators in C
ALL_IN_C = frozenset(FAMILIES)


class _Chosen:
    """Holds the choice of this process; None: not made."""

    choice: KernelChoice | None = None


def in_c(family: str, x: torch.Tensor, *dtypes: torch.dtype) -> bool:
    """Return whether an operator of a family is computed in C for this tensor, which must have one of these dtypes.

    `family`: one of FAMILIES.
    """
    return x.dtype in dtypes and is_real(x) and family in (
        right_in_c() if _Chosen.choice is None else _Chosen.choice)


def set_choice(choice: KernelChoice | None) -> None:
    """Use this choice in this process; None: each family in C whose results are right."""
    _Chosen.choice = choice


def chosen() -> KernelChoice | None:
    """Return the choice that this process has made; None on GPUs, and before the engine is built."""
    return _Chosen.choice


@functools.cache
def right_in_c() -> KernelChoice:
    """Compare the results of each C function with torch's, once per process. A family with a wrong one is not in C.

    Linear layers are not in C where oneDNN does not compute in bf16.
    """
    if not has_library():
        return frozenset()
    without = set() if has_inner_product() else {"linear"}
    wrong = {trial.family for trial in TRIALS if trial.family not in without and not is_right(trial)}
    if wrong:
        print(f"warning: the C kernels for {', '.join(sorted(wrong))} give wrong results on this CPU: the compiler "
              "may not know it; torch's operators are used, which are slower. Another compiler can be chosen with the "
              "variable CC", file=sys.stderr, flush=True)
    return ALL_IN_C - wrong - without


def measure_choice(possible: KernelChoice) -> tuple[KernelChoice, dict[str, tuple[float, float]]]:
    """Measure each family that is possible in C. Takes some milliseconds per family.

    Returns the choice, and the times of each measured family in milliseconds, in C and with torch's operators.
    """
    times: dict[str, tuple[float, float]] = {}
    for trial in TRIALS:
        if trial.family in possible:
            before, now = times.get(trial.family, (0.0, 0.0)), times_ms(trial)
            times[trial.family] = (before[0] + now[0], before[1] + now[1])
    slower = {family for family, (in_c, in_torch) in times.items() if in_torch < _MARGIN * in_c}
    return possible - slower, times


def fastest_choice() -> KernelChoice:
    """Return the cached choice for this CPU, torch, library, number of threads and instructions; else measure it."""
    possible = right_in_c()
    if not possible:
        return possible
    path = _path()
    cached = _read(path)
    if cached is None:
        choice, times = measure_choice(possible)
        cached = _read(path)  # another process may have measured at the same time
        if cached is None:
            _write(path, choice, times)
            cached = choice
    return cached & possible


def choose(recorded: dict[str, bool] | None, *, measured: bool = True) -> None:
    """Choose at the start of a run which families of operators are computed in C. Collective; on GPUs, do nothing.

    The order of preference is: the choice that the run folder records, because a resume must be bit-exact; the choice
    that is cached for the CPU of rank 0; a measurement of some milliseconds on rank 0. A family that is not possible on
    the CPU of every rank is computed by torch on all ranks: replicas of the parameters must stay equal.

    Args:
        recorded: the choice of the run's newest start, as run.json has it; only rank 0's value is used.
        measured: whether a family is in C only if it is faster. Two runs may measure different times.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    wanted: list[Any] = [(parse_choice(recorded), fastest_choice() if measured else right_in_c())
                         if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(wanted, src=0)
    earlier, fastest = wanted[0]
    possible = frozenset.intersection(*gather(right_in_c()))
    set_choice((fastest if earlier is None else earlier) & possible)
    lost = sorted((earlier or frozenset()) - possible)
    if lost and dist.get_rank() == 0:
        print(f"warning: the C kernels for {', '.join(lost)}, which this run used before, are not available on this "
              "machine, so torch's operators are used: the next losses differ in the last bits from those of a run "
              "without this change", file=sys.stderr, flush=True)


def as_json(choice: KernelChoice) -> dict[str, bool]:
    """Return the choice as run.json and the file of the choice have it."""
    return {family: family in choice for family in FAMILIES}


def parse_choice(values: Any) -> KernelChoice | None:
    """Return the choice in a JSON object; None if it is not one. Families that it lacks are in C."""
    if not isinstance(values, dict) or not all(isinstance(value, bool) for value in values.values()):
        return None
    return frozenset(family for family in FAMILIES if values.get(family, True))


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


def _write(path: Path, choice: KernelChoice, times: dict[str, tuple[float, float]]) -> None:
    """Write the file. A full disk is ignored."""
    content = {"in_c": as_json(choice), "cpu": cpu_name(), "torch": torch.__version__,
               "threads": torch.get_num_threads(), "library": library_name(),
               "milliseconds_in_c_and_torch": {family: [round(value, 4) for value in pair]
                                               for family, pair in times.items()}}
    with contextlib.suppress(OSError):
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(content, indent=1), encoding="utf-8")
        own.chmod(0o644)  # several users may share the folder
        own.replace(path)
