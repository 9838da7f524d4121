"""Fit the step-time model's parameters to published rows on the A100 with 80 GB, and print both.

    python -m tests.extensions.planner.fit_throughput

Not used for the fit: the rows of other GPUs in gpu_throughput.csv, and every third row of gpu_throughput_3d.csv.
"""

import math
from dataclasses import dataclass, replace

from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters, fit
from tests.extensions.planner.gpu_throughput import (
    FITTED_GPU,
    TABLE_PARAMETERS,
    predict,
    read_measurements,
    throughput_table,
)
from tests.extensions.planner.gpu_throughput_3d import (
    PARAMETERS_3D,
    predict_3d,
    read_step_measurements,
    throughput_table_3d,
)

FITTED = ("memory_efficiency", "link_efficiency", "attention_speed", "attention_speed_3d")
# From other values the fit may end at other ones, because a slower link and slower attention describe the same rows:
# from 0.6, 0.7, 0.6 and 0.6 it ends at 0.42, 0.52, 0.52 and 0.29.
START = {"memory_efficiency": 0.43, "link_efficiency": 0.8, "attention_speed": 0.52, "attention_speed_3d": 0.4}
ZERO = [(row.gpu, row) for row in read_measurements()]
STEPS = read_step_measurements()


@dataclass(frozen=True)
class FittedParameters(TimeParameters):
    """Parameters of all rows. The two tables were measured with different attention kernels."""

    attention_speed_3d: float = PARAMETERS_3D.attention_speed


IN_USE = FittedParameters(**{**vars(DEFAULT_PARAMETERS), "attention_speed": TABLE_PARAMETERS.attention_speed})


def ratios(parameters: FittedParameters = IN_USE) -> dict[str, list[float]]:
    """Return predicted divided by measured speed of all rows: by GPU with ZeRO alone, then "3d fit" and "3d test"."""
    found: dict[str, list[float]] = {}
    for gpu, row in ZERO:
        found.setdefault(gpu, []).append(row.measured_seconds / predict(row, parameters).total_seconds)
    unfused = replace(parameters, attention_speed=parameters.attention_speed_3d)
    for step in STEPS:
        ratio = step.seconds / predict_3d(step, unfused).total_seconds
        found.setdefault("3d test" if step.is_test else "3d fit", []).append(ratio)
    return found


def fit_error(parameters: FittedParameters) -> float:
    """Return the means of |log(predicted / measured)| of the rows used for the fit, summed over the two tables.

    A few slow rows hardly influence it.
    """
    found = ratios(parameters)
    return sum(sum(abs(math.log(ratio)) for ratio in found[name]) / len(found[name]) for name in (FITTED_GPU, "3d fit"))


def error_of_tests(found: dict[str, list[float]], names: list[str]) -> float:
    """Return the relative error that 95% of the named rows do not exceed."""
    errors = sorted(max(ratio, 1 / ratio) - 1 for name in names for ratio in found[name])
    return errors[math.ceil(0.95 * len(errors)) - 1]


def summary_rows() -> list[str]:
    """Return the rows of the page's table: how many predictions are within 15%, and the range of all."""
    titles = {"h100": "H100, ZeRO alone", "a100": "A100-80, ZeRO alone (used for the fit)", "a100-40":
              "A100-40, ZeRO alone", "3d fit": "tensor or pipeline parallelism (used for the fit)",
              "3d test": "tensor or pipeline parallelism"}
    return [f"| {titles[name]} | {sum(1 / 1.15 <= ratio <= 1.15 for ratio in own)} of {len(own)} | "
            f"{min(own):.2f} to {max(own):.2f} |" for name, own in ratios().items()]


def main() -> None:
    """Print the result of the fit, the errors with the parameters in use, and all rows."""
    fitted = fit(replace(IN_USE, **START), FITTED, fit_error)  # type: ignore[arg-type]
    for name in FITTED:
        print(f"{name:20s} fitted {getattr(fitted, name):.3g}, in use {getattr(IN_USE, name):.3g}")
    found = ratios()
    print("\n".join(summary_rows()))
    print(f"95% of the rows that were not used for the fit: ZeRO alone within "
          f"{error_of_tests(found, ['h100', 'a100-40']):.0%}, tensor or pipeline parallel within "
          f"{error_of_tests(found, ['3d test']):.0%}")
    print("\n".join([*throughput_table(), "", *throughput_table_3d()]))


if __name__ == "__main__":
    main()
