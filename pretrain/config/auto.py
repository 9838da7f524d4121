"""Values that replace "auto" in a DeepSpeed JSON, and the computation of missing batch sizes.

Training (`fill.py`) and the memory planner (`lenient.py`) share them.
"""

from typing import Any

DEFAULT_LEARNING_RATE = 3e-4
DEFAULT_BETAS = (0.9, 0.95)
DEFAULT_EPSILON = 1e-8
DEFAULT_WEIGHT_DECAY = 0.1
DEFAULT_GRADIENT_CLIPPING = 1.0
DEFAULT_MICRO_BATCH_SIZE = 1
DEFAULT_GRADIENT_ACCUMULATION_STEPS = 1
PRECISIONS = ("bf16", "fp16", "fp32")


def auto_precision(bf16: Any, fp16: Any) -> str:
    """Return the precision that bf16.enabled and fp16.enabled select.

    True comes before "auto", and bf16 before fp16. fp32 is selected if neither of them is True or "auto".
    """
    for enabled in (True, "auto"):
        for name, value in (("bf16", bf16), ("fp16", fp16)):
            if value == enabled:
                return name
    return "fp32"


def fill_zero_sizes(zero: dict[str, Any], hidden_size: int) -> None:
    """Replace "auto" sizes (elements) in the zero_optimization block with the formulas that transformers documents."""
    sizes = {"reduce_bucket_size": hidden_size**2, "prefetch_bucket_size": int(0.9 * hidden_size**2),
             "param_persistence_threshold": 10 * hidden_size}
    for name, size in sizes.items():
        for key in (name, f"stage3_{name}"):
            if zero.get(key) == "auto":
                zero[key] = size


def complete_batch_sizes(micro: int | None, steps: int | None, total: int | None,
                         data_parallel_size: int) -> tuple[int, int, int]:
    """Return micro-batch size, accumulation steps and global batch size. None is computed from the other values.

    Divisions round down, as in DeepSpeed. The caller checks that the product is the global batch size.
    """
    if total is None:
        micro = micro or DEFAULT_MICRO_BATCH_SIZE
        steps = steps or DEFAULT_GRADIENT_ACCUMULATION_STEPS
        return micro, steps, micro * steps * data_parallel_size
    if micro is None:
        steps = steps or DEFAULT_GRADIENT_ACCUMULATION_STEPS
        return total // (steps * data_parallel_size), steps, total
    if steps is None:
        steps = total // (micro * data_parallel_size)
    return micro, steps, total
