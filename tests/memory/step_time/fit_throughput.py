"""Fit the step-time model's parameters to the A100-80 rows of the published table, and print both.

    python -m tests.memory.step_time.fit_throughput
"""

import math
from dataclasses import replace

from pretrain.memory.step_time.time_parameters import TimeParameters
from tests.support.gpu_throughput import (
    FITTED_GPU,
    TABLE_PARAMETERS,
    Measurement,
    predict,
    read_measurements,
    throughput_table,
)

FITTED = ("memory_efficiency", "attention_speed", "attention_half_keys", "overlap_cost")
_STEPS = (1.3, 1.1, 1.03, 1.01)  # factors that are tried on each parameter, one after the other


def mean_error(rows: list[Measurement], parameters: TimeParameters) -> float:
    """Return the mean of |log(predicted / measured)|, which a few slow rows hardly influence."""
    errors = [math.log(predict(row, parameters).total_seconds / row.measured_seconds) for row in rows]
    return sum(map(abs, errors)) / len(errors)


def fit(rows: list[Measurement], parameters: TimeParameters) -> TimeParameters:
    """Minimize the error by changing one parameter at a time, with smaller and smaller steps."""
    best = mean_error(rows, parameters)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for factor in (step, 1 / step):
                    changed = replace(parameters, **{name: getattr(parameters, name) * factor})
                    error = mean_error(rows, changed)
                    if error < best - 1e-6:
                        best, parameters, improved = error, changed, True
    return parameters


def main() -> None:
    """Fit, starting from round values, and print the result and the error per GPU."""
    rows = read_measurements()
    start = replace(TABLE_PARAMETERS, memory_efficiency=0.7, attention_speed=0.6, attention_half_keys=500.0,
                    overlap_cost=0.5)
    fitted = fit([row for row in rows if row.gpu == FITTED_GPU], start)
    for name in FITTED:
        print(f"{name:20s} fitted {getattr(fitted, name):.3g}, in use {getattr(TABLE_PARAMETERS, name):.3g}")
    for gpu in dict.fromkeys(row.gpu for row in rows):
        own = [row for row in rows if row.gpu == gpu]
        ratios = [predict(row, fitted).total_seconds / row.measured_seconds for row in own]
        print(f"{gpu:8s} {sum(1 / 1.15 <= ratio <= 1.15 for ratio in ratios)} of {len(own)} rows within 15%; "
              f"predicted / measured seconds {min(ratios):.2f} to {max(ratios):.2f}")
    print("\n".join(throughput_table(fitted)))


if __name__ == "__main__":
    main()
