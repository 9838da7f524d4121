"""MeasuredRun: layout, model, hardware and step times of a run, read from its run folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout import Layout, parse_layout
from pretrain.errors import ConfigError, counted
from pretrain.model.config import model_config_from
from pretrain.model.description import ModelConfig
from pretrain.model.recompute import PARTS
from pretrain.monitor.read_run_folder import newest_path, read_metrics, read_starts
from pretrain.stored_json import build

_FEWEST_ROWS = 3  # logged steps that a calibration needs, without the first one, which includes the warm-up
_LARGEST = 10**9  # tokens of a sample, samples of a step
_FLAGS = ("seq_length", "recompute", "recompute_every", "document_attention")  # that the layout depends on


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
        ranks = counted(layout.world_size, "rank")
        stages = f", {layout.pipeline_stages} pipeline stages" if layout.pipeline_stages > 1 else ""
        return f"{self.path}: {self.gpu_name or 'CPU ' + str(self.host.get('cpu', ''))}, {ranks}, " \
               f"{layout.precision}, ZeRO-{layout.zero_stage}{stages}, {layout.micro_batch_size} x " \
               f"{layout.gradient_accumulation_steps} samples of {layout.seq_length} tokens; {self.rows} logged steps"


class _Gpu(TypedDict):
    name: str
    memory_bytes: int


class _Host(TypedDict):
    cpu: str | None
    cores: int
    ranks: int
    memory_bytes: int
    gpus: list[_Gpu]


class _MeasuredStart(TypedDict):
    """The keys of a record in run.json that a calibration needs; others may be missing."""

    first_step: int
    hardware: list[_Host]
    environment: dict[str, Any]
    model_config: dict[str, Any]
    deepspeed_config: dict[str, Any]
    layout: dict[str, Any]
    flags: dict[str, Any]


def read_measured_run(path: str) -> MeasuredRun:
    """Read run.json and metrics.jsonl of a run folder. Raises ConfigError if a calibration cannot use them."""
    run = Path(path)
    if not run.is_dir():
        raise ConfigError("--calibrate", problem=f"there is no run folder {path}",
                          remedy="Name the folder that the run has in --save")
    values, rows = _newest_measured_start(run)
    try:
        start = build(_MeasuredStart, {"environment": {}, **values})
        world_size = build(int, start["layout"].get("world_size"), "layout.world_size")
        if not start["hardware"]:
            raise ValueError("hardware is empty")
        host = start["hardware"][0]
        if min(world_size, host["cores"], host["ranks"], host["memory_bytes"]) < 1:
            raise ValueError("a number of hardware or layout is below 1")
        if (part := start["flags"].get("recompute")) not in (None, *PARTS):
            raise ValueError(f"flags.recompute is {part}")
        layer_times = build(list[int], (values.get("layer_times") or {}).get("nanoseconds", []), "layer_times")
    except ValueError as error:
        raise ConfigError(str(run / "run.json"), problem=f"a calibration cannot use the start ({error})") from None
    on_gpu = bool(host["gpus"]) and start["environment"].get("DS_ACCELERATOR") != "cpu"
    gpu = host["gpus"][0] if on_gpu else _Gpu(name="", memory_bytes=0)
    chosen = str(start["environment"].get("OMP_NUM_THREADS") or "")
    threads = int(chosen) if chosen.isdecimal() else host["cores"] // host["ranks"]
    layout = _layout_of(values, world_size, rows[-1], "cuda" if on_gpu else "cpu", tuple(layer_times))
    seconds = median(row["step_time_ms"] for row in rows) / 1e3
    return MeasuredRun(
        path, layout, model_config_from(start["model_config"], f"{run / 'run.json'}: model_config"), gpu["name"],
        gpu["memory_bytes"], {"cpu": host["cpu"], "cores": host["cores"], "ranks": host["ranks"],
                              "memory_bytes": host["memory_bytes"]},
        max(1, threads), seconds, _phases(rows, layout, seconds), len(rows))


def _newest_measured_start(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the newest start with enough rows, and these rows. Raises ConfigError if no start has enough."""
    rows = [row for row in read_metrics(run) if _is_time(row.get("step_time_ms"))]
    rows = newest_path(rows)
    most, last = 0, float("inf")
    for start in reversed(read_starts(run)):
        first = start.get("first_step", 0)
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


def _layout_of(start: dict[str, Any], world_size: int, row: dict[str, Any], device_kind: str,
               layer_times: tuple[int, ...]) -> Layout:
    """Return the layout, with the batch size and sequence length of a row."""
    flags = RunArguments(**{name: start["flags"][name] for name in _FLAGS if start["flags"].get(name) is not None})
    length, samples = row.get("seq_length"), row.get("global_batch_size")
    layout = parse_layout(start["deepspeed_config"], world_size=world_size, device_kind=device_kind,
                          seq_length=length if isinstance(length, int) and 0 < length < _LARGEST else flags.seq_length,
                          recompute=flags.recompute or "none", recompute_every=flags.recompute_every,
                          document_attention=flags.document_attention, layer_times=layer_times)
    if isinstance(samples, int) and 0 < samples < _LARGEST:
        steps = max(1, samples // (layout.micro_batch_size * layout.data_parallel_size))
        layout = replace(layout, gradient_accumulation_steps=steps)
    return layout


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
