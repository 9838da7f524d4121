"""Parameters of the step-time model, with the source of each one, and their fit to measurements.

"Fitted": to 94 measurements of other programs on the A100 with 80 GB, 71 of them with tensor or pipeline parallelism
(tests/golden/gpu_throughput.csv and gpu_throughput_3d.csv). `python -m tests.extensions.planner.fit_throughput` repeats
the fit; README.md of the extension shows the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pretrain.config.layout import Layout

# Of `fit`: factors that each parameter is multiplied with or divided by, one after the other
_FACTORS = (2.0, 1.3, 1.1, 1.03, 1.01)
_SMALLEST_GAIN = 1e-8
_MOST_ROUNDS = 200


@dataclass(frozen=True)
class TimeParameters:
    """Efficiencies and latencies. `--calibrate` replaces some of them. The field names are keys of `--json`."""

    # Factor on all rates of the device: 1, or the result of --calibrate.
    compute_speed: float = 1.0
    # Fraction of the device memory's bandwidth that norms, activations, residuals and the loss reach. Fitted. It is low
    # because it also stands for small kernels that are not counted.
    memory_efficiency: float = 0.44
    # Speed of the attention kernel relative to FlashAttention-2. The fit gives 0.52 for FlashAttention's Triton kernel,
    # which was used for those measurements. "Around 2x" as fast: FlashAttention-2, arXiv 2307.08691, abstract.
    attention_speed: float = 1.0
    # Keys that a query sees for which attention reaches half of its efficiency on long sequences: an assumption. The
    # measurements are described about equally well with 200 to 700.
    attention_half_keys: float = 400.0
    # Seconds that communication costs although it overlaps, for each second that it takes: it uses multiprocessors and
    # memory bandwidth of the computation. An assumption; the measurements are described about equally well with 0.2 to
    # 0.6.
    overlap_cost: float = 0.5
    # Fraction of a link's stated bandwidth that transfers reach. Fitted. It is low because it also stands for waiting:
    # for ranks that are late for a collective, and for kernels that are launched after it.
    link_efficiency: float = 0.47
    # Seconds that the host needs to launch a kernel from Python: an assumption, for PyTorch without CUDA graphs.
    launch_seconds: float = 1e-5
    # Bytes a second of a node's memory that DeepSpeedCPUAdam reads and writes: an assumption.
    host_adam_rate: float = 100e9
    # Factor on the optimizer's rate: 1, or the result of --calibrate.
    optimizer_speed: float = 1.0


DEFAULT_PARAMETERS = TimeParameters()
# Relative error of predicted step times that 95% of the published rows which were not used for the fit do not exceed,
# rounded up to 5%: README.md. The second one also stands for layouts without published rows.
_ERROR_ZERO, _ERROR_OTHERS = 0.15, 0.20


def model_error(layout: Layout) -> float:
    """Return the relative error of a layout's predicted step time: with ZeRO alone, or with anything else."""
    degrees = layout.pipeline_stages * layout.tensor_parallel_size * layout.sequence_parallel_size
    offloads = {layout.offload_optimizer, layout.offload_param} != {"none"}
    return _ERROR_OTHERS if degrees * layout.expert_parallel_size > 1 or offloads else _ERROR_ZERO


def fit(parameters: TimeParameters, names: Sequence[str],
        error: Callable[[TimeParameters], float]) -> TimeParameters:
    """Minimize `error` by changing one of the named parameters at a time, with smaller and smaller factors."""
    best = error(parameters)
    for step in _FACTORS:
        for _ in range(_MOST_ROUNDS):
            before = best
            for name in names:
                for factor in (step, 1 / step):
                    changed = replace(parameters, **{name: getattr(parameters, name) * factor})
                    found = error(changed)
                    if found < best - _SMALLEST_GAIN:
                        best, parameters = found, changed
            if best == before:
                break
    return parameters
