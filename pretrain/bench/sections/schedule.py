"""--what schedule: a step with the zero-bubble schedule ZB-H1, compared with 1F1B, which runs."""

import statistics
from typing import Any

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import InterleavedResults, run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress

STAGES, ENGINE = 2, "two schedules"
MICRO_BATCHES = (4, 8, 16)
# whether ZB-H1 runs, within one repetition; a linear change of the machine's speed affects both sums alike
_ORDER = (False, True, True, False)


def highest_gain(stages: int, micro_batches: int) -> float:
    """Time of a step with 1F1B / with ZB-H1, if forward pass and both parts of the backward pass take equal times.

    Let t be this time, p the number of stages and m that of micro-batches. Each stage computes for 3 m t. The bubble of
    1F1B has (p - 1) 3 t, and that of ZB-H1 (p - 1) t (Qi et al., arXiv 2401.10241).
    """
    return 3 * (micro_batches + stages - 1) / (3 * micro_batches + stages - 1)


def schedule(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Train with both schedules on one engine with 2 stages, in interleaved steps with the same samples and weights."""
    settings = context.settings
    micro_batch_size = max(settings.preset.micro_batch_size // 4, 1)
    job = context.job(ENGINE, "two_schedules", ranks=STAGES, stages=STAGES, micro_batch_size=micro_batch_size,
                      gradient_accumulation_steps=max(MICRO_BATCHES), train_flags=("--plain_operators",),
                      micro_batches=MICRO_BATCHES)
    requests: list[dict[str, Any]] = [
        {"steps": settings.preset.steps, "untimed_steps": 1 if settings.device.kind == "cuda" else 0,
         "micro_batches": count, "zero_bubble": on} for count in MICRO_BATCHES for on in _ORDER]
    results = run_interleaved([[job]], context, report, requests=requests, warmup_steps=0)
    return schedule_section(results, micro_batch_size=micro_batch_size, steps=settings.preset.steps)


def schedule_section(results: InterleavedResults, *, micro_batch_size: int, steps: int) -> BenchSection:
    """Compute the table and the figures from the answers; a request has `steps` timed steps."""
    title = f"Pipeline schedules, 2 stages, micro-batches of {micro_batch_size}, torch's operators"
    if ENGINE not in results.answers:
        return BenchSection("schedule", title, [""], [], [], results.failures)
    figures = {count: _figures(results, index, count, steps) for index, count in enumerate(MICRO_BATCHES)}
    failures = [f"schedule: the steps with {count} micro-batches have different {kind}: {sorted(set(values[kind]))}"
                for count, values in figures.items() for kind in ("losses", "grad_norms") if len(set(values[kind])) > 1]
    rows = [[str(count), f"{values['step_time_ms']['1F1B']:,.0f} ms", f"{values['step_time_ms']['ZB-H1']:,.0f} ms",
             f"{values['ratio']:.3f} ({min(values['ratios']):.3f} to {max(values['ratios']):.3f})",
             f"{highest_gain(STAGES, count):.3f}", *map(_mebibytes, values["peak_memory_bytes"].values())]
            for count, values in figures.items()]
    any_figures = figures[MICRO_BATCHES[0]]
    notes = [f"Medians of {len(any_figures['ratios'])} repetitions of 1F1B, ZB-H1, ZB-H1, 1F1B; the ratio is the "
             "median, lowest and highest of the repetitions' ratios.",
             "Calculated: 3 (m + 1) / (3 m + 1) for m micro-batches, with equal times of forward pass, gradients of "
             "inputs and gradients of weights, without transfers and optimizer.",
             "Peak memory: of all tensors in a step, on the rank with the most."]
    if not failures:
        notes.append(f"In all {len(any_figures['losses'])} steps with the same micro-batches, of both schedules, loss "
                     "and gradient norm are equal in all bits. The weights do not change: the learning rate is 0.")
    return BenchSection("schedule", title, ["micro-batches", "1F1B", "ZB-H1", "1F1B / ZB-H1", "calculated",
                                            "peak memory, 1F1B", "ZB-H1"], rows, notes,
                        [*results.failures, *failures], {"micro_batches": figures})


def _figures(results: InterleavedResults, index: int, micro_batches: int, steps: int) -> dict[str, Any]:
    """Return the figures of the requests with the number of micro-batches MICRO_BATCHES[index]."""
    answers, size = results.answers[ENGINE], len(_ORDER)
    repetitions = [answers[at : at + size] for at in range(index * size, len(answers), size * len(MICRO_BATCHES))]
    one_f_one_b, zero_bubble = ([1e3 * statistics.fmean(
        answer["seconds"] for answer, is_on in zip(repetition, _ORDER, strict=True) if is_on == on) / steps
        for repetition in repetitions] for on in (False, True))
    ratios = [before / after for before, after in zip(one_f_one_b, zero_bubble, strict=True)]
    used = [answer for repetition in repetitions for answer in repetition]
    ranks = results.facts[ENGINE]["ranks"]
    return {"ratio": statistics.median(ratios), "ratios": ratios,
            "step_time_ms": {"1F1B": statistics.median(one_f_one_b), "ZB-H1": statistics.median(zero_bubble)},
            "peak_memory_bytes": {name: max((rank["peaks"][f"{micro_batches} {on}"] or 0) for rank in ranks)
                                  for name, on in (("1F1B", False), ("ZB-H1", True))},
            "losses": [loss for answer in used for loss in answer["losses"]],
            "grad_norms": [norm for answer in used for norm in answer["grad_norms"]]}


def _mebibytes(peak_bytes: int) -> str:
    """Return the text of a peak; "unknown" on a CPU without jemalloc, whose counters the measurement needs."""
    return f"{peak_bytes / 2**20:,.1f} MiB" if peak_bytes else "unknown"
