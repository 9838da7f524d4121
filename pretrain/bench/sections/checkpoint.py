"""--what checkpoint: how long a save stops training, and saving and loading compared with the disk's rate."""

import statistics
from typing import Any

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress

SAVE_INTERVAL_S = 1800.0  # training time between two saves, for the fractions
_STEPS = 3  # timed before each save
_REQUESTS: tuple[dict[str, Any], ...] = (
    {"kind": "disk"}, {"kind": "save", "steps": _STEPS}, {"kind": "load"},
    {"kind": "disk"}, {"kind": "async_save", "steps": _STEPS})
_LABELS = {"save": "synchronous save", "async_save": "--async_save", "verify": "verification", "load": "load",
           "resume": "verification and load"}


def checkpoint_rates(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Save checkpoints with the step loop's `Saver`, alternately synchronously and in the background, and load them.

    The rate of the disk is measured in the same repetition, in the same folder. The stall is the time of `Saver.save`,
    until the device is idle again. A background save also slows down the steps that run during the save, because it
    uses cores and the disk. The slowdown is the sum of the additional times of these steps. The stall and the slowdown
    are also reported as a fraction of SAVE_INTERVAL_S.
    """
    name = "checkpoints"
    results = run_interleaved([[context.job(name, "checkpoint")]], context, report, warmup_steps=0,
                              requests=list(_REQUESTS))
    answers = results.answers.get(name, [])
    repetitions = [answers[start:start + len(_REQUESTS)] for start in range(0, len(answers), len(_REQUESTS))]
    rows, data, notes = [], {}, []
    # leave out the first repetition, which also creates folders and buffers
    measured = [figures_of(repetition) for repetition in repetitions[1:] or repetitions]
    if measured:
        disk = {key: _median(measured, "disk", key) for key in ("write", "read")}
        data = {label: {key: _median(measured, kind, key) for key in measured[0][kind]}
                for kind, label in _LABELS.items()}
        rows = [["disk, write and fsync", _rate(disk["write"]), "", "", ""],
                ["disk, read", _rate(disk["read"]), "", "", ""],
                *(_row(label, data[label]) for label in _LABELS.values())]
        num_bytes = repetitions[-1][1]["checkpoint_bytes"]
        data |= {"checkpoint_bytes": num_bytes, "disk": disk}
        notes = [f"A checkpoint has {num_bytes / 1e9:.2f} GB. The disk writes and reads one file of this size, like dd "
                 "with bs=16M and conv=fsync. Files are read from the disk, and not from the page cache.",
                 "Verification compares SHA-256 hashes. Training continues during --async_save. Fractions are of "
                 f"{SAVE_INTERVAL_S / 60:.0f} minutes between two saves. All figures are medians; the first of several "
                 "repetitions is left out."]
    return BenchSection("checkpoint", "Checkpoints", ["", "rate", "of the disk's rate", "stall of training",
                                                      "stall and slowdown, fraction"], rows, notes, results.failures,
                        data)


def figures_of(repetition: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures of one repetition by kind: rates in bytes per second, and as fractions of the disk's rate."""
    before_save, saved, loaded, before_async, saved_async = repetition
    figures: dict[str, dict[str, float]] = {
        "disk": {"write": statistics.fmean(disk["write_bytes_per_s"] for disk in (before_save, before_async)),
                 "read": statistics.fmean(disk["read_bytes_per_s"] for disk in (before_save, before_async))}}
    for kind, answer, disk in (("save", saved, before_save), ("async_save", saved_async, before_async)):
        rate = answer["checkpoint_bytes"] / answer["write_s"]
        total_s = answer["blocking_s"] + max(answer["slowdown_s"], 0)
        figures[kind] = {"bytes_per_s": rate, "of_disk": rate / disk["write_bytes_per_s"],
                         "blocking_s": answer["blocking_s"], "slowdown_s": answer["slowdown_s"],
                         "total_share": total_s / SAVE_INTERVAL_S}
    for kind in ("verify", "load", "resume"):
        rate = saved["checkpoint_bytes"] / loaded[f"{kind}_s"]
        figures[kind] = {"bytes_per_s": rate, "of_disk": rate / before_save["read_bytes_per_s"]}
    return figures


def _median(measured: list[dict[str, dict[str, float]]], kind: str, key: str) -> float:
    return statistics.median(figures[kind][key] for figures in measured)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _row(label: str, figures: dict[str, float]) -> list[str]:
    row = [label, _rate(figures["bytes_per_s"]), f"{figures['of_disk']:.2f}"]
    if "blocking_s" not in figures:
        return [*row, "", ""]
    return [*row, f"{figures['blocking_s']:.2f} s", f"{figures['total_share']:.3%}"]
