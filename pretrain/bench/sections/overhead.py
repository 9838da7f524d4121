"""--what overhead: the time that pretrain/trainer.py adds to the engine's step."""

import statistics

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import InterleavedResults, run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread

LOOP, BARE = "step loop", "bare engine"
LOG_INTERVAL = 10  # default of --log_interval; a repetition has so many steps that at least one is logged


def overhead(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare `pretrain.trainer.train` with direct calls of the same engine, which always get the same batch.

    The step loop reads data, logs at the default interval and checks for signals. It neither saves nor evaluates. The
    overhead is the median of (loop / bare - 1) over the repetitions. The two times of a repetition are measured one
    directly after the other.
    """
    steps = max(context.settings.preset.steps, LOG_INTERVAL)
    results = run_interleaved([[context.job(LOOP, "loop")], [context.job(BARE, "bare_engine")]], context, report,
                              steps=steps)
    return overhead_section(results, steps=steps)


def overhead_section(results: InterleavedResults, *, steps: int) -> BenchSection:
    """Compute the table and the figures from the answers; a repetition has `steps` steps."""
    times = {name: [1e3 * value / steps for value in results.seconds(name)] for name in results.answers}
    fraction = None
    if len(times) == 2:
        fraction = statistics.median(loop / bare - 1 for loop, bare in zip(times[LOOP], times[BARE], strict=True))
    rows = [[name, f"{statistics.median(values):,.1f} ms", f"{spread(values):.1%}",
             f"{fraction:+.2%}" if fraction is not None and name == LOOP else ""] for name, values in times.items()]
    measured = [answer for answer in results.answers.get(LOOP, ()) if "measurement_cpu_s" in answer]
    measurements = [answer["measurement_cpu_s"] / answer["thread_cpu_s"] for answer in measured]
    if measured:
        per_step_ms = statistics.median(1e3 * answer["measurement_cpu_s"] / steps for answer in measured)
        rows.append(["measurements (CPU time)", f"{per_step_ms:,.2f} ms", f"{spread(measurements):.1%}",
                     f"{statistics.median(measurements):+.2%}"])
    notes = [f"Medians over the repetitions of {steps} steps each.",
             "The measurements are the rows of metrics.jsonl and the phase timers: their part of the CPU time of the "
             "step loop, in the same run."]
    return BenchSection("overhead", "Overhead of the step loop", ["", "step", "spread", "overhead"], rows, notes,
                        results.failures,
                        {"overhead": fraction, "step_time_ms": times, "measurements": measurements})
