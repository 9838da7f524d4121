"""Models that are built from transformers' modules have the properties of all others, on real DeepSpeed engines.

Equal losses in every layout, resumes with equal bits in the same layout and with equal losses in another one.
"""

from typing import Any

from tests.support.cases import CPU, config
from tests.support.layouts import dp2, pp2

TOLERANCE = 1e-6  # relative, fp32
REFERENCE = (1, config(0, micro=8, accumulation=1), {})
# name -> (number of ranks, DeepSpeed JSON, flags); 8 samples a step
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero1": (2, dp2(1), {}), "zero2": (2, dp2(2), {}), "zero3": (2, dp2(3), {}),
    "zero3_offload": (2, dp2(3, offload_optimizer=CPU, offload_param=CPU), {}),
    "pipeline_zero0": (2, pp2(0), {}), "pipeline_zero1": (2, pp2(1), {}),
    "recompute": (2, dp2(2), {"recompute": "blocks"}), "pipeline_recompute": (2, pp2(1, checkpoint_every=1), {}),
}
