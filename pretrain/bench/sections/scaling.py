"""--what scaling: speed of 1, 2 (and 4) data-parallel ranks, each with the same number of cores or one GPU."""

import statistics

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread
from pretrain.bench.sections.step import tokens_per_second


def scaling(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure weak scaling with ZeRO-1: each rank has one micro-batch, so the work grows with the number of ranks.

    On a CPU each rank has cores / (largest number of ranks) cores. With fewer ranks some cores are idle, and the other
    ranks can use the memory bandwidth and the clock rate of the idle cores.
    """
    settings = context.settings
    names = {ranks: f"{ranks} rank{'s' * (ranks > 1)}" for ranks in settings.rank_counts}
    most_ranks = settings.rank_counts[-1]
    groups = [[context.job(name, "project", ranks=ranks, core_parts=most_ranks)] for ranks, name in names.items()]
    results = run_interleaved(groups, context, report)
    rates = {ranks: tokens_per_second(context, results.seconds(name), settings.preset.steps,
                                      samples=ranks * settings.preset.micro_batch_size)
             for ranks, name in names.items() if name in results.answers}
    medians = {ranks: statistics.median(values) for ranks, values in rates.items()}
    efficiency = {ranks: rate / ranks / medians[1] for ranks, rate in medians.items() if 1 in medians}
    rows = [[names[ranks], f"{rate:,.0f}", f"{spread(rates[ranks]):.1%}",
             f"{efficiency[ranks]:.1%}" if ranks in efficiency else ""] for ranks, rate in medians.items()]
    device = f"{len(settings.cores_of(0, most_ranks))} core(s)" if settings.device.kind == "cpu" else "one GPU"
    return BenchSection("scaling", "Data-parallel ranks, one micro-batch each",
                        ["", "tokens/s", "spread", "of linear"], rows, [f"Each rank has {device}."], results.failures,
                        {"tokens_per_second": medians, "rounds": rates, "efficiency": efficiency})
