"""--what checkpoint: how long a checkpoint stops training, and what fraction of a run that is."""

import statistics

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress

SAVE_INTERVAL_S = 1800.0
_LABELS = {False: "synchronous", True: "--async_save"}  # by RunArguments.async_save


def checkpoint_stall(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Save with the step loop's own saver, alternately synchronous and in the background.

    The stall is the time that `Saver.save` takes. A background save also slows down the steps that run during it,
    because it uses cores and the disk; this slowdown is reported separately. Both are also given as a fraction of a run
    that saves every 30 minutes.
    """
    name = "checkpoints"
    results = run_interleaved([[context.job(name, "checkpoint")]], context, report, warmup_steps=0,
                              requests=[{"steps": 3, "async": is_async} for is_async in _LABELS])
    answers = results.answers.get(name, [])
    rows, data = [], {}
    for number, (is_async, label) in enumerate(_LABELS.items()):
        saves = answers[number::2][1:] or answers[number::2]  # the first save also creates folders and buffers
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
        notes = [f"A checkpoint of {answers[-1]['checkpoint_bytes'] / 1e9:.2f} GB every {SAVE_INTERVAL_S / 60:.0f} "
                 "minutes; medians, without the first save of each row."]
    return BenchSection("checkpoint", "Checkpoints",
                        ["", "training stops for", "fraction of the run", "slowdown of steps during the save",
                         "both together"], rows, notes, results.failures, data)
