"""Choose at the start of a run which families of operators are computed in C: the same ones on all ranks.

The order of preference is: the choice that the run folder records, because a resume must be bit-exact; the choice that
is cached for the CPU of rank 0; a measurement of some milliseconds on rank 0. A family that is not possible on the CPU
of every rank is computed by torch on all ranks: replicas of the parameters must stay equal.
"""

import functools
import sys
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.distributed.collectives import gather
from pretrain.model.kernels.cpu.choice import KernelChoice, fastest_choice, parse_choice, right_in_c, set_choice


def choose_kernels(recorded: dict[str, bool] | None) -> None:
    """Make the choice, and use it in this process. Collective; on GPUs it does nothing.

    Args:
        recorded: the choice of the run's newest start, as run.json has it; only rank 0's value is used.
    """
    if get_accelerator().device_name() != "cpu":
        return
    wanted: list[Any] = [(parse_choice(recorded), fastest_choice()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(wanted, src=0)
    earlier, fastest = wanted[0]
    possible = functools.reduce(KernelChoice.both, gather(right_in_c()))
    set_choice((earlier or fastest).both(possible))
    lost = [family for family in earlier.in_c() if not getattr(possible, family)] if earlier else []
    if lost and dist.get_rank() == 0:
        print(f"warning: the C kernels for {', '.join(lost)}, which this run used before, are not available on this "
              "machine, so torch's operators are used: the next losses differ in the last bits from those of a run "
              "without this change", file=sys.stderr, flush=True)
