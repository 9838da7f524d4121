"""MeasuredRun: layout, model, hardware and step times of a run, read from its run folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from pretrain.config.layout import Layout, parse_layout
from pretrain.errors import ConfigError
from pretrain.model.config import model_config_from
from pretrain.model.description import ModelConfig
from pretrain.model.recompute import PARTS
from pretrain.monitor.read_run_folder import newest_path, read_metrics, read_starts

_FEWEST_ROWS = 3  # logged steps that a calibration needs, without the first one, which includes the warm-up
_LARGEST = 10**9  # tokens of a sample, samples of a step


@dataclass(frozen=True)
class MeasuredRun:
    """One run. Times are medians over logged steps, in seconds."""

    path: str
    layout: Layout
    model: ModelConfig
    gpu_name: str  # of torch; "": the run used CPUs
    gpu_memory_bytes: int
    host: dict[str, Any]  # cpu, cores, memory_bytes, ranks
    threads: int  # of a rank
    step_seconds: float
    phases: dict[str, float]  # seconds of forward, backward and update; empty: they were not measured
    rows: int  # number of logged steps that the medians are over

    def describe(self) -> str:
        """Describe the run in one line."""
        layout = self.layout
        ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
        stages = f", {layout.pipeline_stages} pipeline stages" if layout.pipeline_stages > 1 else ""
        return f"{self.path}: {self.gpu_name or 'CPU ' + str(self.host.get('cpu', ''))}, {ranks}, " \
               f"{layout.precision}, ZeRO-{layout.zero_stage}{stages}, {layout.micro_batch_size} x " \
               f"{layout.gradient_accumulation_steps} samples of {layout.seq_length} tokens; {self.rows} logged steps"


def read_measured_run(path: str) -> MeasuredRun:
    """Read run.json and metrics.jsonl of a run folder. Raises ConfigError if a calibration cannot use them."""
    run = Path(path)
    if not run.is_dir():
        raise ConfigError("--calibrate", problem=f"there is no run folder {path}",
                          remedy="Name the folder that the run has in --save")
    start, rows = _newest_measured_start(run)
    on_gpu = bool(start.find("hardware", 0, "gpus")) and start.find("environment", "DS_ACCELERATOR") != "cpu"
    model = model_config_from(start.table("model_config"), f"{start.path}: model_config")
    layout = _layout_of(start, rows[-1], "cuda" if on_gpu else "cpu")
    cores, ranks = (start.number("hardware", 0, key, low=1) for key in ("cores", "ranks"))
    host = {"cpu": str(start.find("hardware", 0, "cpu")), "cores": cores, "ranks": ranks,
            "memory_bytes": start.number("hardware", 0, "memory_bytes", low=2**20)}
    chosen = str(start.find("environment", "OMP_NUM_THREADS") or "")
    seconds = median(row["step_time_ms"] for row in rows) / 1e3
    return MeasuredRun(
        path, layout, model,
        str(start.find("hardware", 0, "gpus", 0, "name")) if on_gpu else "",
        start.number("hardware", 0, "gpus", 0, "memory_bytes", low=2**20) if on_gpu else 0,
        host, max(1, int(chosen)) if chosen.isdecimal() else max(1, cores // ranks),
        seconds, _phases(rows, layout, seconds), len(rows))


@dataclass(frozen=True)
class _Record:
    """The record of a start in run.json, with checks: the file may have been written by another version."""

    values: dict[str, Any]
    path: str

    def find(self, *keys: str | int) -> Any:
        """Return the value under some keys and list positions; None if there is none."""
        value: Any = self.values
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def number(self, *keys: str | int, low: int) -> int:
        """Return a whole number of at least `low`. Raises ConfigError for anything else."""
        value = self.find(*keys)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._error(keys, value, f"a whole number of at least {low}")
        return value

    def table(self, *keys: str | int) -> dict[str, Any]:
        """Return a JSON object. Raises ConfigError for anything else."""
        value = self.find(*keys)
        if not isinstance(value, dict):
            raise self._error(keys, value, "a JSON object")
        return value

    def _error(self, keys: tuple[str | int, ...], value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.path}: {'.'.join(map(str, keys))}", found=repr(value), expected=expected)


def _newest_measured_start(run: Path) -> tuple[_Record, list[dict[str, Any]]]:
    """Return the newest start with enough rows, and these rows. Raises ConfigError if no start has enough."""
    rows = [row for row in read_metrics(run) if isinstance(row.get("step"), int) and _is_time(row.get("step_time_ms"))]
    rows = newest_path(rows)
    most, last = 0, float("inf")
    for values in reversed(read_starts(run)):
        start = _Record(values, str(run / "run.json"))
        first = start.number("first_step", low=0)
        found = _comparable([row for row in rows if first < row["step"] <= last])
        if len(found) >= _FEWEST_ROWS:
            return start, found
        most, last = max(most, len(found)), min(last, first)
    raise ConfigError(str(run / "metrics.jsonl"),
                      problem=f"a calibration needs a start with {_FEWEST_ROWS} logged steps after its first one "
                              f"(found {most})",
                      remedy="Train for more steps, or with a smaller --log_interval")


def _comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the newest batch size and sequence length, without the first logged step."""
    return [row for row in rows[1:] if all(row.get(key) == rows[-1].get(key)
                                           for key in ("seq_length", "global_batch_size"))]


def _is_time(value: object) -> bool:
    """Return whether a value is a number of milliseconds above 0 and below a month."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 3e9


def _layout_of(start: _Record, row: dict[str, Any], device_kind: str) -> Layout:
    """Return the layout, with the batch size and sequence length of a row."""
    length, samples = row.get("seq_length"), row.get("global_batch_size")
    if not isinstance(length, int) or not 0 < length < _LARGEST:
        length = start.number("flags", "seq_length", low=1)
    layout = parse_layout(start.table("deepspeed_config"), world_size=start.number("layout", "world_size", low=1),
                          seq_length=length, device_kind=device_kind)
    if not isinstance(samples, int) or not 0 < samples < _LARGEST:
        samples = layout.global_batch_size
    part, every = start.find("flags", "recompute"), start.find("flags", "recompute_every")
    times = start.find("layer_times", "nanoseconds")
    return replace(
        layout, layer_times=tuple(times) if isinstance(times, list) else (),
        recompute=part if part in PARTS else layout.recompute,
        recompute_every=every if isinstance(every, int) and every > 0 else 1,
        document_attention=start.find("flags", "document_attention") is True,
        gradient_accumulation_steps=max(1, samples // (layout.micro_batch_size * layout.data_parallel_size)))


def _phases(rows: list[dict[str, Any]], layout: Layout, step_seconds: float) -> dict[str, float]:
    """Return the seconds of the phases, scaled to the step time; {} with pipeline stages, which wait between phases."""
    needed = ("forward_time_ms", "backward_time_ms", "optimizer_time_ms")
    if layout.pipeline_stages > 1 or not all(_is_time(row.get(key)) for row in rows for key in needed):
        return {}
    reduce = [row["reduce_time_ms"] if _is_time(row.get("reduce_time_ms")) else 0.0 for row in rows]
    forward, backward, optimizer = (median(row[key] for row in rows) for key in needed)
    update = optimizer + median(reduce)
    scale = step_seconds / (forward + backward + update)
    return {"forward": scale * forward, "backward": scale * backward, "update": scale * update}
