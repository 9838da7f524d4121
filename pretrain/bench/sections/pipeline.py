"""--what pipeline: speed-up of 2 pipeline stages with 8 micro-batches, compared with the upper bound of 1F1B."""

import statistics
from typing import Any

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread

STAGES, MICRO_BATCHES = 2, 8
PIPELINE, SINGLE = "2 stages x 8 micro-batches", "1 stage on one rank's cores"


def highest_speedup(stage_work: list[float], micro_batches: int) -> float:
    """Upper bound of 1F1B's speed-up over one device: m sum(t) / (sum(t) + (m - 1) max(t)).

    Here t is the list of the stages' work on one micro-batch, and m is the number of micro-batches. The first
    micro-batch passes through all stages. Each further micro-batch finishes later by the time of the slowest
    stage. With p equal stages the bound is m p / (m + p - 1).
    """
    return micro_batches * sum(stage_work) / (sum(stage_work) + (micro_batches - 1) * max(stage_work))


def pipeline(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare the pipeline's speed-up with 1F1B's bound, whose bubble is (p - 1) / (m + p - 1) of the time.

    Let t be the time of one micro-batch on one device without a pipeline. With p stages on p devices and m
    micro-batches, 1F1B takes at least (m + p - 1) t / p (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv
    2104.04473, section 2.2).

    t is measured with p separate engines without a pipeline, which work at the same time. On GPUs each engine has one
    device. On a CPU each engine has an equal part of the cores, like a pipeline stage. So the times with and without a
    pipeline both include the slowdown from sharing memory bandwidth and clock rate.
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
    speedups = [single_s / pipeline_s for single_s, pipeline_s in
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
