"""--what overhead: what pretrain/trainer.py costs beside the step itself."""

import statistics

from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import Say, Section, spread, take_turns

LOOP, BARE = "step loop", "bare engine"
LOG_INTERVAL = 10  # train.py's default: a round has a logged step, or as many as its length asks for


def overhead(workshop: Workshop, say: Say) -> Section:
    """`pretrain.trainer.train` itself against the same engine that is given one batch over and over.

    The loop reads data, logs as by default, and looks for signals; saves and evaluations are left out. The overhead is
    the median over the rounds of (loop / bare - 1), of two times that were taken one right after the other.
    """
    steps = max(workshop.settings.preset.steps, LOG_INTERVAL)
    turns = take_turns([[workshop.job(LOOP, "loop")], [workshop.job(BARE, "bare_engine")]], workshop, say, steps=steps)
    times = {name: [1e3 * value / steps for value in turns.seconds(name)] for name in turns.answers}
    share = None
    if len(times) == 2:
        share = statistics.median(ours / bare - 1 for ours, bare in zip(times[LOOP], times[BARE], strict=True))
    rows = [[name, f"{statistics.median(values):,.1f} ms", f"{spread(values):.1%}",
             f"{share:+.2%}" if share is not None and name == LOOP else ""] for name, values in times.items()]
    return Section("overhead", "Overhead of the step loop",
                   ["", "step", "rounds differ by", "overhead"], rows,
                   [f"Medians of {workshop.settings.rounds} rounds of {steps} steps."], turns.failures,
                   {"overhead": share, "step_time_ms": times})
