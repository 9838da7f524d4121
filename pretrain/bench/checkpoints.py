"""--what checkpoint: how long a save stops training, and saving and loading compared with the disk's rate."""

import statistics
from typing import Any

from pretrain.bench.processes import BenchContext, ReportProgress, run_interleaved
from pretrain.bench.report import BenchSection

SAVE_INTERVAL_S = 1800.0  # training time between two saves, for the fractions
_STEPS = 3  # timed before each save


def checkpoint(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Save checkpoints with the step loop's `Saver`, alternately synchronously and in the background, and load them.

    The rate of the disk is measured in the same repetition, in the same folder. The stall is the time of `Saver.save`,
    until the device is idle again. A background save also slows down the steps that run during the save, because it
    uses cores and the disk. The slowdown is the sum of the additional times of these steps. The stall and the slowdown
    are also reported as a fraction of SAVE_INTERVAL_S.
    """
    name = "checkpoints"
    results = run_interleaved([[context.job(name, "project.checkpoint")]], context, report, steps=_STEPS,
                              warmup_steps=0)
    answers = results.answers.get(name, [])
    # leave out the first repetition, which also creates folders and buffers
    measured = [checkpoint_figures(answer) for answer in answers[1:] or answers]
    if not measured:
        return BenchSection("checkpoint", "Checkpoints", [""], [], [], results.failures)
    data: dict[str, Any] = {label: {key: statistics.median(figures[label][key] for figures in measured)
                                    for key in measured[0][label]} for label in measured[0]}
    disk = data["disk"]
    rows = [["disk, write and fsync", _rate(disk["write"]), "", "", ""],
            ["disk, read", _rate(disk["read"]), "", "", ""],
            *(_checkpoint_row(label, figures) for label, figures in data.items() if label != "disk")]
    num_bytes = data["checkpoint_bytes"] = answers[-1]["save"]["checkpoint_bytes"]
    notes = [f"A checkpoint has {num_bytes / 1e9:.2f} GB. The disk writes and reads one file of this size, like dd "
             "with bs=16M and conv=fsync. Files are read from the disk, and not from the page cache.",
             "Verification compares SHA-256 hashes. Training continues during --async_save. Fractions are of "
             f"{SAVE_INTERVAL_S / 60:.0f} minutes between two saves. All figures are medians; the first of several "
             "repetitions is left out."]
    return BenchSection("checkpoint", "Checkpoints", ["", "rate", "of the disk's rate", "stall of training",
                                                      "stall and slowdown, fraction"], rows, notes, results.failures,
                        data)


def checkpoint_figures(answer: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures of one repetition: rates in bytes per second, and as fractions of the disk's rate."""
    saved, saved_async = answer["save"], answer["async_save"]
    figures: dict[str, dict[str, float]] = {
        "disk": {key: (saved[f"disk_{key}"] + saved_async[f"disk_{key}"]) / 2 for key in ("write", "read")}}
    for label, save in (("synchronous save", saved), ("--async_save", saved_async)):
        rate = save["checkpoint_bytes"] / save["write_s"]
        total_s = save["blocking_s"] + max(save["slowdown_s"], 0)
        figures[label] = {"bytes_per_s": rate, "of_disk": rate / save["disk_write"], "blocking_s": save["blocking_s"],
                          "slowdown_s": save["slowdown_s"], "total_share": total_s / SAVE_INTERVAL_S}
    for label, key in (("verification", "verify_s"), ("load", "load_s"), ("verification and load", "resume_s")):
        rate = saved["checkpoint_bytes"] / saved[key]
        figures[label] = {"bytes_per_s": rate, "of_disk": rate / saved["disk_read"]}
    return figures


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _checkpoint_row(label: str, figures: dict[str, float]) -> list[str]:
    stall = [f"{figures['blocking_s']:.2f} s", f"{figures['total_share']:.3%}"] if "blocking_s" in figures else ["", ""]
    return [label, _rate(figures["bytes_per_s"]), f"{figures['of_disk']:.2f}", *stall]
