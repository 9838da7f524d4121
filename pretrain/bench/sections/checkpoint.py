"""--what checkpoint: how long training stands still for a checkpoint, and what share of a run that is."""

import statistics

from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import Say, Section, take_turns

INTERVAL_S = 1800.0
_NAMES = {False: "synchronous", True: "--async_save"}


def checkpoint_stall(workshop: Workshop, say: Say) -> Section:
    """The loop's own saver, both ways in turns.

    The stall is the time that `Saver.save` takes. A save in the background also slows the steps beside it (by the cores
    and the disk that it uses): the time that they took beyond the usual is told apart. Both as a share of a run that
    saves every 30 minutes.
    """
    name = "checkpoints"
    turns = take_turns([[workshop.job(name, "checkpoint")]], workshop, say, warmup_steps=0,
                       requests=[{"steps": 3, "async": kind} for kind in _NAMES])
    answers = turns.answers.get(name, [])
    rows, data = [], {}
    for number, (kind, label) in enumerate(_NAMES.items()):
        mine = answers[number::2][1:] or answers[number::2]  # the first one makes folders and buffers
        if not mine:
            continue
        blocking_s, slowdown_s = (statistics.median(answer[key] for answer in mine)
                                  for key in ("blocking_s", "slowdown_s"))
        stall = blocking_s / INTERVAL_S
        data[label] = {"blocking_s": blocking_s, "slowdown_s": slowdown_s, "stall_share": stall,
                       "total_share": (blocking_s + max(slowdown_s, 0)) / INTERVAL_S, "async": kind,
                       "rounds": [answer["blocking_s"] for answer in mine]}
        rows.append([label, f"{blocking_s:.2f} s", f"{stall:.3%}", f"{slowdown_s:+.2f} s",
                     f"{data[label]['total_share']:.3%}"])
    notes = []
    if answers:
        data["checkpoint_bytes"] = answers[-1]["checkpoint_bytes"]
        notes = [f"A checkpoint of {answers[-1]['checkpoint_bytes'] / 1e9:.2f} GB every {INTERVAL_S / 60:.0f} minutes; "
                 "medians, without the first of each kind."]
    return Section("checkpoint", "Checkpoints",
                   ["", "training stands still", "share of the run", "steps beside it take longer by", "both together"],
                   rows, notes, turns.failures, data)
