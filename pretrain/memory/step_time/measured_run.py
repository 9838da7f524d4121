"""MeasuredRun: layout, model, hardware and step times of a run, read from its run folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from pretrain.config.layout import Layout, parse_layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import ModelShape, shape_of
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.monitor.read_run_folder import newest_path, newest_start, read_metrics

_FEWEST_ROWS = 3  # logged steps that a calibration needs, without the first one, which includes the warm-up


@dataclass(frozen=True)
class MeasuredRun:
    """One run. Times are medians over logged steps, in seconds."""

    path: str
    layout: Layout
    model: ModelConfig
    shape: ModelShape
    gpu_name: str  # of torch; "": the run used CPUs
    gpu_memory_bytes: int
    host: dict[str, Any]  # a host's record in run.json: cpu, cores, memory_bytes, ranks
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
    start = newest_start(run)
    rows = _usable_rows(run, start)
    try:
        host = start["hardware"][0]
        gpu = (host["gpus"] or [{}])[0]
        model = model_config_from(start["model_config"], str(run / "run.json"))
        layout = _layout_of(start, rows[-1], "cuda" if gpu and not _used_cpu(start) else "cpu")
        threads = int(start["environment"].get("OMP_NUM_THREADS") or max(1, host["cores"] // host["ranks"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(run / "run.json"), problem=f"the record of the newest start lacks {error}",
                          remedy="The run was started by another version; start it again for some steps") from None
    on_gpu = layout.device_kind == "cuda"
    seconds = median(row["step_time_ms"] for row in rows) / 1e3
    return MeasuredRun(
        path, layout, model, shape_of(model), str(gpu["name"]) if on_gpu else "",
        int(gpu["memory_bytes"]) if on_gpu else 0, host, threads, seconds, _phases(rows, layout, seconds), len(rows))


def _used_cpu(start: dict[str, Any]) -> bool:
    return start["environment"].get("DS_ACCELERATOR") == "cpu"


def _usable_rows(run: Path, start: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the newest start with the newest batch size and length, without the first logged step."""
    first_step = start.get("first_step") or 0
    rows = [row for row in newest_path([row for row in read_metrics(run) if "step_time_ms" in row and "step" in row])
            if row["step"] > first_step and isinstance(row["step_time_ms"], (int, float))]
    rows = [row for row in rows[1:] if all(
        row.get(key) == rows[-1].get(key) for key in ("seq_length", "global_batch_size"))]
    if len(rows) < _FEWEST_ROWS:
        raise ConfigError(str(run / "metrics.jsonl"),
                          problem=f"it has {len(rows)} logged steps after the first one of the newest start, too few "
                                  "for a calibration",
                          remedy=f"Train until there are {_FEWEST_ROWS}, or with a smaller --log_interval")
    return rows


def _layout_of(start: dict[str, Any], row: dict[str, Any], device_kind: str) -> Layout:
    """Return the layout, with the batch size and sequence length of a row."""
    flags = start["flags"]
    layout = parse_layout(start["deepspeed_config"], world_size=start["layout"]["world_size"],
                          seq_length=row.get("seq_length") or flags["seq_length"], device_kind=device_kind)
    part = flags.get("recompute") or layout.recompute
    samples = row.get("global_batch_size") or layout.global_batch_size
    steps = max(1, samples // (layout.micro_batch_size * layout.data_parallel_size))
    return replace(layout, recompute=part, recompute_every=flags.get("recompute_every") or 1,
                   document_attention=bool(flags.get("document_attention")), gradient_accumulation_steps=steps)


def _phases(rows: list[dict[str, Any]], layout: Layout, step_seconds: float) -> dict[str, float]:
    """Return the seconds of the phases, scaled to the step time; {} with pipeline stages, which wait between phases."""
    names = {"forward": ("forward_time_ms",), "backward": ("backward_time_ms",),
             "update": ("reduce_time_ms", "optimizer_time_ms")}
    if layout.pipeline_stages > 1 or any(row.get(name) is None for row in rows for name in
                                         ("forward_time_ms", "backward_time_ms", "optimizer_time_ms")):
        return {}
    found = {phase: median(sum(row.get(key) or 0.0 for key in keys) for row in rows) for phase, keys in names.items()}
    total = sum(found.values())
    return {phase: step_seconds * each / total for phase, each in found.items()} if total > 0 else {}
