"""Metrics of a run for Prometheus: the newest rows of metrics.jsonl, and counts of events.

The names and help texts are those of the tables in monitor/rows.py, with the prefix `ds_pretrain_`. A value that is
null, such as a NaN, is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pretrain.monitor.read_run_folder import is_number
from pretrain.monitor.rows import EVALUATION_ROW, EVENTS, OPTIONAL_KEYS, TRAINING_ROW

_PREFIX = "ds_pretrain_"
_EVALUATED = ("eval_loss", "eval_ppl")
# name -> help text, of the metrics that are no keys of a row
OTHER_METRICS = {
    "last_step_time_seconds": "when the newest training row was written, since 1970: time() minus this one grows while "
                              "the run makes no progress",
    "train_steps": "number of steps of the complete run (steps)",
    "task_score": "newest score of a task of --eval_tasks",
    "events_total": "rows of events.jsonl, by event",
    "slow_rank_ratio": "of each rank that is slow now: its time, relative to the median (event slow_rank)",
    "run_info": "1; the labels describe the run",
}


@dataclass
class Values:
    """What the follower knows about the run. It replaces values and never changes them, so that threads may read."""

    row: dict[str, Any] = field(default_factory=dict)  # newest training row
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)  # split -> newest row
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))
    slow_ranks: dict[str, tuple[dict[str, str], float]] = field(default_factory=dict)  # rank -> labels, ratio
    info: dict[str, str] = field(default_factory=dict)
    train_steps: int | None = None

    def see_row(self, row: dict[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        if "split" in row:
            self.evaluations = {**self.evaluations, str(row["split"]): row}
        elif "loss" in row:
            self.row = row

    def see_event(self, row: dict[str, Any]) -> None:
        """Add a row of events.jsonl."""
        event, ranks, hosts = row["event"], row.get("ranks") or (), list(map(str, row.get("hosts") or ()))
        self.events = {**self.events, event: self.events.get(event, 0) + 1}
        if event == "slow_rank":
            what = {key: str(row.get(key, "")) for key in ("stage", "kind")}
            ratio = row["ratio"] if is_number(row.get("ratio")) else 1.0
            by_rank = hosts if len(hosts) == len(ranks) else [", ".join(hosts)] * len(ranks)
            self.slow_ranks = {**self.slow_ranks, **{
                str(rank): ({"rank": str(rank), "host": host, **what}, ratio)
                for rank, host in zip(ranks, by_rank, strict=True)}}
        elif event in ("slow_rank_over", "start"):
            over = set(map(str, ranks)) if event == "slow_rank_over" else self.slow_ranks.keys()
            self.slow_ranks = {rank: value for rank, value in self.slow_ranks.items() if rank not in over}


def metric_names() -> dict[str, str]:
    """Return name -> help text of all metrics."""
    keys = {**TRAINING_ROW, **OPTIONAL_KEYS, **{key: EVALUATION_ROW[key] for key in _EVALUATED}}
    names = {key: f"{text} ({unit})" if unit else text for key, (unit, text) in keys.items() if key != "time"}
    return {_PREFIX + name: text.replace("`", "") for name, text in {**names, **OTHER_METRICS}.items()}


class Collector:
    """Gives the values to prometheus-client when they are asked for."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that have a value now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        helps, found = metric_names(), self._samples()
        for name, samples in found.items():
            labels = list(samples[0][0])
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(_PREFIX + name, helps[_PREFIX + name], labels=labels)
            for by, value in samples:
                family.add_metric([by[label] for label in labels], value)
            yield family

    def _samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Return name without prefix -> samples: labels and value. Metrics without a sample are left out."""
        values = self._values
        row, evaluations = values.row, values.evaluations
        found: dict[str, list[tuple[dict[str, str], float]]] = {
            key: [({}, row[key])] for key in (*TRAINING_ROW, *OPTIONAL_KEYS)
            if key != "time" and is_number(row.get(key))}
        if is_number(row.get("time")):
            found["last_step_time_seconds"] = [({}, row["time"])]
        if values.train_steps:
            found["train_steps"] = [({}, values.train_steps)]
        for key in _EVALUATED:
            found[key] = [({"split": split}, at[key]) for split, at in evaluations.items() if is_number(at.get(key))]
        found["task_score"] = [
            ({"task": split.removeprefix("tasks/"), "metric": key}, value) for split, at in evaluations.items()
            if split.startswith("tasks/") for key, value in at.items()
            if key not in EVALUATION_ROW and is_number(value)]
        found["events_total"] = [({"event": event}, count) for event, count in values.events.items()]
        found["slow_rank_ratio"] = list(values.slow_ranks.values())
        found["run_info"] = [(values.info, 1)] if values.info else []
        return {name: samples for name, samples in found.items() if samples}


def serve(values: Values, port: int, address: str) -> None:
    """Serve the metrics in daemon threads. Raises OSError."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(Collector(values))
    start_http_server(port, addr=address, registry=registry)
