"""KernelChoice: which families of operators are computed in C on this CPU, and which by torch.

A run makes the choice once, at its start, for all ranks (engine/operators/choose_kernels.py), because the variants
differ in the last bits of their results. Processes that make no choice use each family in C whose results
are right on this CPU.
"""

import functools
import sys
from dataclasses import asdict, dataclass, fields

import torch

from pretrain.model.kernels.cpu.library import has_kernels, has_library
from pretrain.model.kernels.cpu.matrices import has_inner_product
from pretrain.model.kernels.cpu.trials import TRIALS, is_right, times_ms

_MARGIN = 0.9  # torch's operators are chosen if they take less than this fraction of the time in C


@dataclass(frozen=True)
class KernelChoice:
    """One field per family of operators. True: computed in C; False: by torch's operators."""

    activation: bool = True
    linear: bool = True
    norm: bool = True
    attention: bool = True
    loss: bool = True
    optimizer: bool = True

    def both(self, other: "KernelChoice") -> "KernelChoice":
        """Return the choice of the families in C that are in C in both choices."""
        return KernelChoice(**{name: value and getattr(other, name) for name, value in asdict(self).items()})

    def in_c(self) -> list[str]:
        """Return the names of the families in C."""
        return [name for name, value in asdict(self).items() if value]


FAMILIES = tuple(field.name for field in fields(KernelChoice))
NONE_IN_C = KernelChoice(**dict.fromkeys(FAMILIES, False))


class _Chosen:
    """Holds the choice of this process; None: not made."""

    choice: KernelChoice | None = None


def uses_c(family: str, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether an operator of a family is computed in C for this tensor, which must have this dtype.

    `family`: a field of KernelChoice.
    """
    return has_kernels(x, dtype) and bool(getattr(_Chosen.choice or right_in_c(), family))


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
        return NONE_IN_C
    without = set() if has_inner_product() else {"linear"}
    wrong = {trial.family for trial in TRIALS if trial.family not in without and not is_right(trial)}
    if wrong:
        print(f"warning: the C kernels for {', '.join(sorted(wrong))} give wrong results on this CPU: the compiler "
              "may not know it; torch's operators are used, which are slower. Another compiler can be chosen with the "
              "variable CC", file=sys.stderr, flush=True)
    return KernelChoice(**{family: family not in wrong | without for family in FAMILIES})


def measure_choice(possible: KernelChoice) -> tuple[KernelChoice, dict[str, tuple[float, float]]]:
    """Measure each family that is possible in C. Takes some milliseconds per family.

    Returns the choice, and the times of each measured family in milliseconds, in C and with torch's operators.
    """
    times: dict[str, tuple[float, float]] = {}
    for trial in TRIALS:
        if getattr(possible, trial.family):
            before, now = times.get(trial.family, (0.0, 0.0)), times_ms(trial)
            times[trial.family] = (before[0] + now[0], before[1] + now[1])
    slower = {family for family, (in_c, in_torch) in times.items() if in_torch < _MARGIN * in_c}
    return possible.both(KernelChoice(**{family: family not in slower for family in FAMILIES})), times
