"""Sections as tables on a terminal, as JSON, and as the README's benchmark tables."""

import datetime
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.bench.processes.baseline_job import shape
from pretrain.bench.processes.interleave import Section
from pretrain.bench.settings import Settings
from pretrain.distributed.device import nvidia_smi
from pretrain.errors import ConfigError
from pretrain.monitor.run_folder import versions


def gpu_names() -> list[str]:
    """As nvidia-smi lists them, at most as many as CUDA_VISIBLE_DEVICES lets through; none where it is not there."""
    names = nvidia_smi("name")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([word for word in visible.split(",") if word.strip()])]


def device_name(settings: Settings) -> str:
    """What a reader of the figures must know of the machine."""
    if settings.device.kind == "cuda":
        return gpu_names()[0]
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    return f"{len(settings.cores)} cores of {found[1] if found else 'an unknown CPU'}"


def heading(settings: Settings, words: Sequence[str]) -> dict[str, Any]:
    """Date, device, command, versions, and how busy the machine was before."""
    return {"date": datetime.date.today().isoformat(), "device": device_name(settings), "preset": settings.preset_name,
            "shape": shape(settings), "command": " ".join(["python tools/bench.py", *words]),
            "rounds": settings.rounds, "load_before": os.getloadavg()[0], "versions": versions()}


def busy(head: dict[str, Any], settings: Settings) -> str:
    """A warning, or "": others that work on this CPU are in every figure."""
    share = head["load_before"] / len(settings.cores)
    return f"The machine was busy before the start (load {head['load_before']:.1f}): these are no quiet figures." \
        if share > 0.25 else ""


def as_json(head: dict[str, Any], sections: Sequence[Section]) -> str:
    """One object: the heading, the failures, and each section's figures by its word."""
    return json.dumps({**head, "failures": [line for section in sections for line in section.failures],
                       "sections": {section.what: section.data for section in sections}}, indent=1)


def show(section: Section, console: Console) -> None:
    """A table, its notes and its failures."""
    console.print(section.title, style="bold")
    table = Table()
    for number, column in enumerate(section.columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*row)
    if section.rows:
        console.print(table)
    for note in section.notes:
        console.print(note)
    for line in section.failures:
        console.print(f"failed: {line}")
    console.print()


def markdown(head: dict[str, Any], sections: Sequence[Section], warning: str) -> str:
    """The README's text: date, device and command, then a table a section."""
    lines = [f"{head['date']}, {head['device']}, torch {head['versions']['torch']}, "
             f"DeepSpeed {head['versions']['deepspeed']}, transformers {head['versions']['transformers']}: "
             f"`{head['command']}`", "", f"{head['shape']}.", *(["", warning] if warning else [])]
    for section in sections:
        lines += ["", f"**{section.title}**", ""]
        if section.rows:
            lines += [_line(section.columns), _line(["---"] + ["---:"] * (len(section.columns) - 1)),
                      *map(_line, section.rows), ""]
        lines += [f"- {line}" for line in (*section.notes, *(f"failed: {line}" for line in section.failures))]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markers(preset: str) -> tuple[str, str]:
    """What stands before and after a preset's figures in the README."""
    return f"<!-- bench {preset}: begin -->", f"<!-- bench {preset}: end -->"


def check_markers(path: Path, preset: str) -> None:
    """Raises ConfigError where there is nothing to write between; to be asked before hours are spent on measuring."""
    begin, end = markers(preset)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--write", found=f"{path} ({error})", expected="a readable text file") from None
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ConfigError(f"--write {path}", found="no place for these figures",
                          expected=f'a line "{begin}" and, after it, a line "{end}"')
    if not os.access(path, os.W_OK):
        raise ConfigError("--write", found=f"{path}, which cannot be written to", expected="a writable file")


def write_between_markers(path: Path, preset: str, text: str) -> None:
    """Replace what stands between a preset's two markers."""
    begin, end = markers(preset)
    old = path.read_text(encoding="utf-8")
    before, after = old[: old.index(begin) + len(begin)], old[old.index(end):]
    path.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
