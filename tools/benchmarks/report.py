"""BenchSection, the result of one section: printed as Markdown, or written as a CSV file."""

import csv
import datetime
import io
import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.distributed.device import cpu_name, cpuinfo, nvidia_smi
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from pretrain.monitor.environment import versions
from tools.benchmarks.settings import BenchSettings

# flag in /proc/cpuinfo -> name of the instructions, the fastest for products in bf16 first
_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16", "avx512f": "AVX512", "avx2": "AVX2",
                 "sve": "SVE", "bf16": "NEON with BF16"}
_BUSY_LOAD = 0.25  # load average per core


@dataclass(frozen=True)
class BenchSection:
    """Table and figures of one section."""

    name: str  # a choice of --what
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # one line for each failed baseline
    data: dict[str, Any] = field(default_factory=dict)  # figures for --json


def spread(values: list[float]) -> float:
    """Return (highest - lowest) / median of a value over the repetitions."""
    return (max(values) - min(values)) / statistics.median(values)


def gpu_names() -> list[str]:
    """Return the names of the visible GPUs, according to nvidia-smi; an empty list if nvidia-smi fails."""
    names = nvidia_smi("name")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([word for word in visible.split(",") if word.strip()])]


def device_name(settings: BenchSettings) -> str:
    """Return the name of the GPU, or the cores, the name and the fastest instructions of the CPU."""
    if settings.device.kind == "cuda":
        return gpu_names()[0]
    flags = re.search(r"^(flags|Features)\s*:(.+)$", cpuinfo(), re.MULTILINE)
    names = set(flags[2].split()) if flags else set()
    fastest = next((f" ({text})" for flag, text in _INSTRUCTIONS.items() if flag in names), "")
    return f"{len(os.sched_getaffinity(0))} cores of {cpu_name() or 'an unknown CPU'}{fastest}"


def heading(settings: BenchSettings, words: Sequence[str]) -> dict[str, Any]:
    """Return date, device, model, command, versions, and the load of the machine before the measurement."""
    preset = settings.preset
    model = load_model_config(preset.model, preset.overrides.format(positions=preset.seq_length) or None)
    shape = f"{model.num_parameters() / 1e6:,.1f} M parameters ({model.num_layers} layers, width " \
            f"{model.hidden_size}, vocabulary {model.vocab_size:,}), sequence {preset.seq_length:,}, micro-batch " \
            f"{preset.micro_batch_size}, {settings.precision}, ZeRO-1"
    return {"date": datetime.date.today().isoformat(), "device": device_name(settings), "preset": settings.preset_name,
            "shape": shape, "command": " ".join(["python tools/bench.py", *words]),
            "rounds": settings.repetitions, "load_before": os.getloadavg()[0], "versions": versions()}


def as_json(head: dict[str, Any], sections: Sequence[BenchSection]) -> str:
    """Return one JSON object: the heading, the failures, and the figures of each section by the section's name."""
    return json.dumps({**head, "failures": [line for section in sections for line in section.failures],
                       "sections": {section.name: section.data for section in sections}}, indent=1)


def markdown(head: dict[str, Any], section: BenchSection) -> str:
    """Return Markdown: title, date, device and command, a warning if the machine was busy, the table, and its notes."""
    lines = [f"**{section.title}.** {head['shape']}. {head['date']}, {head['device']}, torch "
             f"{head['versions']['torch']}, DeepSpeed {head['versions']['deepspeed']}, transformers "
             f"{head['versions']['transformers']}: {head['command']}", ""]
    if head["load_before"] / len(os.sched_getaffinity(0)) > _BUSY_LOAD:
        lines += [f"Warning: the machine was busy before the start (load average {head['load_before']:.1f}), which "
                  "changes every figure below.", ""]
    if section.rows:
        widths = [max(map(len, cells)) for cells in zip(section.columns, *section.rows, strict=True)]
        for row in (section.columns, ["---", *["---:"] * (len(widths) - 1)], *section.rows):
            numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            lines.append(f"| {' | '.join([row[0].ljust(widths[0]), *numbers])} |")
        lines.append("")
    return "\n".join([*lines, *(f"- {line}" for line in section.notes),
                      *(f"- failed: {line}" for line in section.failures)])


def csv_file(folder: Path, head: dict[str, Any], section: BenchSection) -> Path:
    """Return the file of a section's table in the folder of --write."""
    return folder / f"{head['preset']}_{section.name}.csv"


def csv_text(head: dict[str, Any], section: BenchSection) -> str:
    """Return the table as CSV, below comments with all that `markdown` prints next to it."""
    around = [line.removeprefix("- ").replace("**", "") for line in markdown(head, section).splitlines()]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([["row", *section.columns[1:]], *section.rows])
    return "".join(f"# {line}\n" for line in around if line and not line.startswith("|")) + table.getvalue()


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless files can be written into a folder. Call this before measuring."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError("--write", problem=f"{folder} is not a writable folder")
