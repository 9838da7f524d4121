"""Estimates of a training step by name: what `Extension.estimates` returns, and the StepTime in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pretrain.config.layout import Layout
from pretrain.extension import StepEstimates
from pretrain.extensions.planner.cost import cost_line, run_cost
from pretrain.extensions.planner.step_time.calibrate import calibrate, predict_run
from pretrain.extensions.planner.step_time.kernel_time import with_predicted_times
from pretrain.extensions.planner.step_time.time_model import StepTime, predict_step
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters, model_error
from pretrain.memory.compare.compare import ComparisonRow
from pretrain.memory.hardware import Cluster
from pretrain.model.description import ModelConfig
from pretrain.model.flops import flops_per_token

_PARTS = tuple(field.name for field in fields(StepTime))


def step_estimates(cluster: Cluster | None, measured: Sequence[str] = ()) -> StepEstimates:
    """Return the estimates for a cluster, or, if run folders are given, fitted to these. Raises ConfigError."""
    if not measured:
        assert cluster is not None
        return ClusterEstimates(cluster)
    calibration = calibrate(measured)

    def of_machines(layout: Layout, model: ModelConfig, tokens: float | None = None) -> Mapping[str, Any]:
        run = replace(calibration.runs[-1], layout=layout, model=model)
        return by_name(predict_run(run, calibration.parameters), layout, model, tokens)

    return of_machines


@dataclass(frozen=True)
class ClusterEstimates:
    """Estimates for a cluster: see StepEstimates."""

    cluster: Cluster
    parameters: TimeParameters = DEFAULT_PARAMETERS

    def __call__(self, layout: Layout, model: ModelConfig, tokens: float | None = None) -> Mapping[str, Any]:
        """Return the estimates of a layout."""
        layout = with_predicted_times(layout, model, self.cluster)
        return by_name(predict_step(layout, self.cluster, model, self.parameters), layout, model, tokens)


def by_name(time: StepTime, layout: Layout, model: ModelConfig, tokens: float | None) -> dict[str, Any]:
    """Return the estimates that every caller knows, and the parts of the time."""
    found: dict[str, Any] = {**vars(time), "step_seconds": time.total_seconds, "relative_error": model_error(layout),
                             "mfu": time.mfu}
    if tokens is not None:
        found["cost"] = cost_line(run_cost(
            layout, num_parameters=model.num_parameters(), flops_per_token=flops_per_token(model, layout.seq_length),
            peak_flops=time.peak_flops, mfu=time.mfu, tokens=tokens))
    return found


def time_of(row: ComparisonRow) -> StepTime | None:
    """Return the predicted time of a row; None if only its model states are known."""
    return StepTime(**{name: row.step[name] for name in _PARTS}) if row.step else None
