"""Cost of a complete run: days, GPU-hours, size and time of a checkpoint."""

from dataclasses import dataclass

from pretrain.config.checkpoint_size import checkpoint_bytes
from pretrain.config.layout import Layout
from pretrain.memory.footprint import GB

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv 2203.15556, table 3
STORAGE_RATE = 2e9  # bytes a second that one node writes to the checkpoints' storage: an assumption


@dataclass(frozen=True)
class Cost:
    """Cost of a run. The field names are keys of `compare_zero.py --json`."""

    tokens: float
    chinchilla_tokens: float
    flops: float  # model FLOPs, without recomputation
    mfu: float
    days: float
    gpu_hours: float
    checkpoint_bytes: int
    checkpoint_seconds: float


def run_cost(layout: Layout, *, num_parameters: int, flops_per_token: float, peak_flops: float, mfu: float,
             nodes: int, tokens: float | None = None, storage_rate: float = STORAGE_RATE) -> Cost:
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
    size = checkpoint_bytes(layout, num_parameters)
    return Cost(tokens=tokens, chinchilla_tokens=optimal, flops=tokens * flops_per_token, mfu=mfu,
                days=seconds / 86400, gpu_hours=seconds / 3600 * layout.world_size, checkpoint_bytes=size,
                checkpoint_seconds=size / nodes / storage_rate)


def cost_lines(cost: Cost, nodes: int, storage_rate: float = STORAGE_RATE) -> list[str]:
    """Describe a cost in two sentences."""
    rule = "Chinchilla's 20 a parameter" if cost.tokens == cost.chinchilla_tokens else \
        f"Chinchilla's 20 a parameter would be {_tokens(cost.chinchilla_tokens)}"
    return [f"{_tokens(cost.tokens)} tokens ({rule}) are {cost.flops:.3g} FLOPs; at an MFU of {cost.mfu:.1%}: "
            f"{_scaled(cost.days * 86400, _TIMES)}, {_number(cost.gpu_hours)} GPU-hours",
            f"a checkpoint has {_scaled(cost.checkpoint_bytes, _SIZES)} and takes {_number(cost.checkpoint_seconds)} s "
            f"at {storage_rate / GB:g} GB/s a node, {nodes} node{'s' * (nodes > 1)}"]


_TIMES = (("days", 2 * 86400.0, 86400.0), ("hours", 7200.0, 3600.0), ("minutes", 120.0, 60.0), ("s", 0.0, 1.0))
_SIZES = (("TB", 1e12, 1e12), ("GB", 1e9, 1e9), ("MB", 0.0, 1e6))


def _scaled(number: float, units: tuple[tuple[str, float, float], ...]) -> str:
    """Format a number in the first unit whose smallest value it reaches. A unit: (name, smallest value, size)."""
    name, size = next((name, size) for name, smallest, size in units if number >= smallest)
    return f"{_number(number / size)} {name}"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _tokens(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:,.4g} {unit}"
    return f"{number:,.0f}"
