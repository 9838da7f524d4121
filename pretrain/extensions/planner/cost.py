"""Cost of a run: FLOPs, days, GPU-hours, and the size of its checkpoints."""

from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.errors import format_number, tokens_text
from pretrain.memory.footprint import STORAGE_RATE

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv 2203.15556, table 3
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


@dataclass(frozen=True)
class Cost:
    """Cost of a run. The field names are keys of `ds-pretrain compare --json`."""

    tokens: float
    chinchilla_tokens: float
    flops: float  # model FLOPs, without recomputation
    mfu: float
    days: float
    gpu_hours: float
    checkpoint_bytes: int
    checkpoint_seconds: float


def run_cost(layout: Layout, *, num_parameters: int, flops_per_token: float, peak_flops: float, mfu: float,
             nodes: int = 1, tokens: float | None = None, storage_rate: float = STORAGE_RATE) -> Cost:
    """Estimate the cost of a run at a given MFU.

    Args:
        num_parameters: of the model, with all experts.
        peak_flops: of all devices, per second.
        tokens: of the run. None: 20 per parameter (Chinchilla).
        storage_rate: bytes a second that each node writes; all nodes write at the same time.
    """
    optimal = float(CHINCHILLA_TOKENS_PER_PARAMETER * num_parameters)
    tokens = optimal if tokens is None else tokens
    seconds = tokens * flops_per_token / (peak_flops * mfu)
    size = layout.checkpoint_bytes(num_parameters)
    return Cost(tokens=tokens, chinchilla_tokens=optimal, flops=tokens * flops_per_token, mfu=mfu, days=seconds / 86400,
                gpu_hours=seconds / 3600 * layout.world_size, checkpoint_bytes=size,
                checkpoint_seconds=size / nodes / storage_rate)


def cost_line(cost: Cost) -> str:
    """Describe FLOPs and time in one sentence."""
    rule = "Chinchilla's 20 a parameter" if cost.tokens == cost.chinchilla_tokens else \
        f"Chinchilla's 20 a parameter would be {tokens_text(cost.chinchilla_tokens)}"
    seconds = cost.days * 86400
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= 2 * size), ("s", 1.0))
    return f"{tokens_text(cost.tokens)} tokens ({rule}) are {cost.flops:.3g} FLOPs; at an MFU of {cost.mfu:.1%}: " \
           f"{format_number(seconds / size)} {unit}, {format_number(cost.gpu_hours)} GPU-hours"
