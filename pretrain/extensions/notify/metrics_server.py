"""Metrics of a run for Prometheus: the newest rows of metrics.jsonl, and counts of events.

The names and help texts are those of the tables in monitor/rows.py, with the prefix `ds_pretrain_`. A value that is
null, such as a NaN, is left out.
"""

from collections.abc import Iterator
from typing import Any

from pretrain.extensions.notify.messages import RunState
from pretrain.monitor.read_run_folder import is_number
from pretrain.monitor.rows import EVALUATION_ROW, OPTIONAL_KEYS, TRAINING_ROW

_PREFIX = "ds_pretrain_"
_EVALUATED = ("eval_loss", "eval_ppl")
_KEYS = {**TRAINING_ROW, **OPTIONAL_KEYS}
# name -> (unit, help text)
_METRICS = {
    **_KEYS, **{key: EVALUATION_ROW[key] for key in _EVALUATED},
    "train_steps": ("steps", "of the complete run"),
    "events": ("rows", "of events.jsonl, by event, since the process that follows the run was started"),
    "run_info": ("", "1; the labels describe the run"),
}


class Collector:
    """Gives the values to prometheus-client when they are asked for."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that have a value now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state
        evaluations = [(split, row) for split, row in state.evaluations.items()]
        samples: dict[str, list[tuple[dict[str, str], Any]]] = {
            **{key: [({}, state.row.get(key))] for key in _KEYS}, "train_steps": [({}, state.train_steps)],
            **{key: [({"split": split}, row.get(key)) for split, row in evaluations] for key in _EVALUATED},
            "events": [({"event": event}, count) for event, count in state.events.items()],
            "run_info": [(state.info, 1)] if state.info else []}
        for name, found in samples.items():
            if found := [(labels, value) for labels, value in found if is_number(value)]:
                unit, text = _METRICS[name]
                kind = CounterMetricFamily if name == "events" else GaugeMetricFamily
                family = kind(_PREFIX + name, f"{text} ({unit})" if unit else text, labels=list(found[0][0]))
                for labels, value in found:
                    family.add_metric(list(labels.values()), value)
                yield family


def metric_names() -> set[str]:
    """Return the names of all metrics, as Prometheus has them."""
    return {f"{_PREFIX}{name}{'_total' if name == 'events' else ''}" for name in _METRICS}


def serve(state: RunState, port: int, address: str) -> Any:
    """Serve the metrics in daemon threads. Returns the server. Raises OSError."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(Collector(state))
    return start_http_server(port, addr=address, registry=registry)[0]
