"""--what pipeline: speed-up of 2 pipeline stages with 8 micro-batches, compared with the bound of 1F1B."""

import statistics
from typing import Any

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread

STAGES, MICRO_BATCHES = 2, 8
PIPELINE, SINGLE = "2 stages x 8 micro-batches", "1 stage on one rank's cores"


def highest_speedup(stage_work: list[float], micro_batches: int) -> float:
    """Upper bound of 1F1B's speed-up over one device: m sum(t) / (sum(t) + (m - 1) max(t)).

    t is the work of each stage on one micro-batch. The first micro-batch passes all stages; each further one finishes
    later by the time of the largest stage. With p equal stages the bound is m p / (m + p - 1).
    """
    return micro_batches * sum(stage_work) / (sum(stage_work) + (micro_batches - 1) * max(stage_work))


def pipeline(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare the pipeline's speed-up with 1F1B's bound, whose bubble is (p - 1) / (m + p - 1) of the time.

    With p stages on p devices and m micro-batches of time t each on one device, 1F1B takes at least
    (m + p - 1) t / p (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, section 2.2).

    On a GPU machine each stage has a device, and t is the time of one stage on one device. On a CPU the ranks share the
    machine: each rank has an equal part of the cores, and t is measured with p separate one-stage engines, one on each
    part, all working at the same time. Then both times include what the cores lose by sharing memory and clock.
    """
    preset = context.settings.preset
    micro_batch_size = max(preset.micro_batch_size // 4, 1)
    batch: dict[str, Any] = {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": MICRO_BATCHES}
    singles = [context.job(SINGLE if rank == 0 else f"{SINGLE} ({rank})", "project", first_part=rank,
                           core_parts=STAGES, **batch) for rank in range(STAGES)]
    results = run_interleaved([[context.job(PIPELINE, "project", ranks=STAGES, stages=STAGES, **batch)], singles],
                              context, report, steps=max(preset.steps // 2, 1), warmup_steps=1)
    title = f"Pipeline of 2 stages, 8 micro-batches of {micro_batch_size}"
    if len(results.answers) < 2:
        return BenchSection("pipeline", title, [""], [], [], results.failures)
    speedups = [single / piped for single, piped in
                zip(results.seconds(SINGLE), results.seconds(PIPELINE), strict=True)]
    speedup = statistics.median(speedups)
    flops = [facts["stage_flops"] for facts in results.facts[PIPELINE]["ranks"]]
    equal, actual = highest_speedup([1.0] * STAGES, MICRO_BATCHES), highest_speedup(flops, MICRO_BATCHES)
    rows = [["measured", f"{speedup:.3f}", ""],
            ["1F1B's bound, equal stages", f"{equal:.3f}", f"{speedup / equal:.1%}"],
            ["1F1B's bound, actual stages", f"{actual:.3f}", f"{speedup / actual:.1%}"]]
    fractions = " : ".join(f"{value / sum(flops):.0%}" for value in flops)
    return BenchSection("pipeline", title, ["", "speed-up over one stage", "measured / bound"], rows,
                        [f"Median of {context.settings.repetitions} repetitions, spread {spread(speedups):.1%}; "
                         f"the stages have {fractions} of the FLOPs."],
                        results.failures,
                        {"speedup": speedup, "bound": equal, "bound_as_cut": actual, "of_bound": speedup / equal,
                         "of_bound_as_cut": speedup / actual, "rounds": speedups, "stage_flops": flops,
                         "seconds": {name: results.seconds(name) for name in (PIPELINE, SINGLE)}})
