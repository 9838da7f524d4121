"""--explain: which operators take the time of a training step, by torch.profiler."""

from collections import defaultdict

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress

_SHOWN = 12  # operators with a row of their own
_PAGE = "tools/performance.md"


def profile(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Profile this project's training step. The time of an operator does not include operators that it calls."""
    name, steps = "this project", context.settings.preset.steps
    results = run_interleaved([[context.job(name, "profile")]], context, report, requests=[{"steps": steps}])
    answers = results.answers.get(name, [])
    milliseconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for answer in answers:
        for operator in answer["operators"]:
            milliseconds[operator["name"]] += operator["self_time_ms"] / steps / len(answers)
            calls[operator["name"]] += operator["calls"]
    ranked = sorted(milliseconds, key=lambda key: -milliseconds[key])
    total_ms = sum(milliseconds.values())
    rows = [[key, f"{milliseconds[key]:,.2f} ms", f"{milliseconds[key] / total_ms:.1%}",
             f"{calls[key] / steps / len(answers):,.0f}"] for key in ranked[:_SHOWN] if total_ms]
    rest_ms = sum(milliseconds[key] for key in ranked[_SHOWN:])
    if rest_ms:
        rows.append([f"{len(ranked) - _SHOWN} other operators", f"{rest_ms:,.2f} ms", f"{rest_ms / total_ms:.1%}", ""])
    return BenchSection(
        "profile", "Operators of a training step", ["", "time per step", "fraction", "calls per step"], rows,
        [f"Means over {len(answers)} repetitions of {steps} steps; the profiler makes a step slower.",
         f"{_PAGE} explains the optimizations of this project and the speed-up of each."], results.failures,
        {"operators": [{"name": key, "time_ms_per_step": milliseconds[key], "fraction": milliseconds[key] / total_ms}
                       for key in ranked if total_ms]})
