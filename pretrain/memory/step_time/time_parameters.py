"""Parameters of the step-time model, with the source of each one.

"Fitted": to the A100-80 rows of tests/golden/gpu_throughput.csv, which are 23 measurements of other programs. The
command `python -m tests.memory.step_time.fit_throughput` repeats the fit; tools/step_time.md shows the result.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeParameters:
    """Efficiencies and latencies. `--calibrate` replaces some of them. The field names are keys of `--json`."""

    # Factor on all rates of the device: 1, or the result of --calibrate.
    compute_speed: float = 1.0
    # Fraction of the device memory's bandwidth that norms, activations, residuals and the loss reach. Fitted. It is low
    # because it also stands for small kernels that are not counted.
    memory_efficiency: float = 0.43
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
    # Fraction of a link's stated bandwidth that transfers reach: an assumption.
    link_efficiency: float = 0.8
    # Seconds that the host needs to launch a kernel from Python: an assumption, for PyTorch without CUDA graphs.
    launch_seconds: float = 1e-5
    # Bytes a second of a node's memory that DeepSpeedCPUAdam reads and writes: an assumption.
    host_adam_rate: float = 100e9
    # Factor on the optimizer's rate: 1, or the result of --calibrate.
    optimizer_speed: float = 1.0


DEFAULT_PARAMETERS = TimeParameters()
MODEL_ERROR = 0.15  # relative error within which predicted step times are equal; see tools/step_time.md
