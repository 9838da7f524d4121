"""--what guards: the time that all guards of the step loop together add to a step."""

import statistics

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import InterleavedResults, run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread
from pretrain.config.flags.arguments import RunArguments

RANKS, LOOP = 2, "step loop"
# of one repetition; a linear change of the machine's speed within it affects both sums alike
_ORDER = (True, False, False, True)
_EXCHANGES = 100


def guards(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare the step loop with itself: in the same processes, the guards are switched on and off.

    The guards are the watchdog, the requests to save or stop, the guard against bad steps with its window of losses and
    norms, and the skipping of bad updates. The replica check runs only once in --replica_check_interval steps, so one
    check is timed separately, and its time is divided among these steps. The exchange of requests in every step is also
    timed alone. The watchdog's own process runs all the time.
    """
    steps = context.settings.preset.steps
    requests: list[dict[str, object]] = [{"steps": steps, "guards": on} for on in _ORDER]
    results = run_interleaved([[context.job(LOOP, "guarded_loop", ranks=RANKS)]], context, report,
                              requests=[*requests, {"replica_check": True}, {"exchanges": _EXCHANGES}])
    return guards_section(results, steps=steps, interval=RunArguments.replica_check_interval)


def guards_section(results: InterleavedResults, *, steps: int, interval: int) -> BenchSection:
    """Compute the table and the figures from the answers.

    Args:
        steps: steps of one request.
        interval: steps between two replica checks.
    """
    title = f"Guards of the step loop, {RANKS} ranks"
    if LOOP not in results.answers:
        return BenchSection("guards", title, [""], [], [], results.failures)
    seconds, size = results.seconds(LOOP), len(_ORDER) + 2
    repetitions = [seconds[at:at + size] for at in range(0, len(seconds), size)]
    on, off = ([1e3 * statistics.fmean(value for value, is_on in zip(times, _ORDER, strict=False) if is_on == wanted)
                / steps for times in repetitions] for wanted in (True, False))
    check_ms = statistics.median(1e3 * times[-2] for times in repetitions)
    exchange_ms = statistics.median(1e3 * times[-1] for times in repetitions) / _EXCHANGES
    ratios = [with_guards / without for with_guards, without in zip(on, off, strict=True)]
    check = check_ms / interval / statistics.median(off)
    overhead = statistics.median(ratios) - 1 + check
    rows = [["without guards", f"{statistics.median(off):,.1f} ms", f"{spread(off):.1%}", ""],
            ["with guards", f"{statistics.median(on):,.1f} ms", f"{spread(on):.1%}",
             f"{statistics.median(ratios) - 1:+.2%}"],
            [f"replica check, 1 in {interval} steps", f"{check_ms / interval:,.2f} ms", "", f"{check:+.2%}"],
            ["all guards", "", "", f"{overhead:+.2%}"]]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    notes = [f"Medians of {len(ratios)} repetitions, in each of which the guards are on and off for {2 * steps} steps. "
             f"The ratio of a repetition is between {min(ratios) - 1:+.2%} and {max(ratios) - 1:+.2%}, half of them "
             f"between {quartiles[0] - 1:+.2%} and {quartiles[2] - 1:+.2%}.",
             f"One replica check takes {check_ms:,.1f} ms.",
             f"The exchange of requests to save or stop, which every step has, takes {exchange_ms:,.2f} ms: "
             f"{exchange_ms / statistics.median(off):.2%} of a step."]
    return BenchSection("guards", title, ["", "step", "spread", "overhead"], rows, notes, results.failures,
                        {"overhead": overhead, "ratios": ratios, "step_time_ms": {"on": on, "off": off},
                         "replica_check_ms": check_ms, "exchange_ms": exchange_ms})
