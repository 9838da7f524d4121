"""Fit the step-time model's parameters to the A100-80 rows of the published table, and print both.

    python -m tests.memory.step_time.fit_throughput
"""

import math
from dataclasses import replace

from pretrain.memory.step_time.fit import fit
from pretrain.memory.step_time.time_parameters import TimeParameters
from tests.support.gpu_throughput import (
    FITTED_GPU,
    TABLE_PARAMETERS,
    Measurement,
    page_table,
    predict,
    read_measurements,
)

FITTED = ("memory_efficiency", "attention_speed")
START = {"memory_efficiency": 0.7, "attention_speed": 0.6}


def mean_error(rows: list[Measurement], parameters: TimeParameters) -> float:
    """Return the mean of |log(predicted / measured)|, which a few slow rows hardly influence."""
    errors = [math.log(predict(row, parameters).total_seconds / row.measured_seconds) for row in rows]
    return sum(map(abs, errors)) / len(errors)


def fit_to_one_gpu() -> TimeParameters:
    """Fit to the rows of one GPU, starting from round values."""
    rows = [row for row in read_measurements() if row.gpu == FITTED_GPU]
    return fit(replace(TABLE_PARAMETERS, **START), FITTED, lambda parameters: mean_error(rows, parameters))


def main() -> None:
    """Print the result of the fit, the errors with the parameters in use for each GPU, and all rows."""
    fitted, rows = fit_to_one_gpu(), read_measurements()
    for name in FITTED:
        print(f"{name:20s} fitted {getattr(fitted, name):.3g}, in use {getattr(TABLE_PARAMETERS, name):.3g}")
    for gpu in dict.fromkeys(row.gpu for row in rows):
        own = [row for row in rows if row.gpu == gpu]
        ratios = [row.measured_seconds / predict(row).total_seconds for row in own]
        print(f"{gpu:8s} {sum(1 / 1.15 <= ratio <= 1.15 for ratio in ratios)} of {len(own)} rows within 15%; "
              f"predicted / measured speed {min(ratios):.2f} to {max(ratios):.2f}"
              f"{' (fitted to these rows)' if gpu == FITTED_GPU else ''}")
    print("\n".join(page_table()))


if __name__ == "__main__":
    main()
