"""--what checkpoint: the time for which a checkpoint stops training, also as a fraction of the training time."""

import statistics

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress

SAVE_INTERVAL_S = 1800.0  # training time between two saves, for the fractions
_LABELS = {False: "synchronous", True: "--async_save"}  # value of --async_save -> row of the table


def checkpoint_stall(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Save checkpoints with the step loop's `Saver`, alternately synchronously and in the background.

    The stall is the time of `Saver.save`, until the device is idle again. A background save also slows down the steps
    that run during the save, because it uses cores and the disk. The slowdown is the sum of the additional times of
    these steps. The stall, and the sum of stall and slowdown, are also
    reported as fractions of SAVE_INTERVAL_S.
    """
    name = "checkpoints"
    results = run_interleaved([[context.job(name, "checkpoint")]], context, report, warmup_steps=0,
                              requests=[{"steps": 3, "async": is_async} for is_async in _LABELS])
    answers = results.answers.get(name, [])
    rows, data = [], {}
    for number, (is_async, label) in enumerate(_LABELS.items()):
        # leave out the first save, which also creates folders and buffers
        saves = answers[number::2][1:] or answers[number::2]
        if not saves:
            continue
        blocking_s, slowdown_s = (statistics.median(answer[key] for answer in saves)
                                  for key in ("blocking_s", "slowdown_s"))
        stall = blocking_s / SAVE_INTERVAL_S
        total = (blocking_s + max(slowdown_s, 0)) / SAVE_INTERVAL_S
        data[label] = {"blocking_s": blocking_s, "slowdown_s": slowdown_s, "stall_share": stall, "total_share": total,
                       "async": is_async, "rounds": [answer["blocking_s"] for answer in saves]}
        rows.append([label, f"{blocking_s:.2f} s", f"{stall:.3%}", f"{slowdown_s:+.2f} s", f"{total:.3%}"])
    notes = []
    if answers:
        data["checkpoint_bytes"] = answers[-1]["checkpoint_bytes"]
        notes = [f"A checkpoint has {answers[-1]['checkpoint_bytes'] / 1e9:.2f} GB. Fractions are of "
                 f"{SAVE_INTERVAL_S / 60:.0f} minutes between two saves. Times are medians; the first of several "
                 "saves is left out."]
    return BenchSection("checkpoint", "Checkpoints",
                        ["", "stall", "stall, fraction", "slowdown of steps during the save",
                         "stall and slowdown, fraction"], rows, notes, results.failures, data)
