"""--what scaling: 1, 2 (and 4) data-parallel ranks, each with the same cores or one GPU."""

import statistics

from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import Say, Section, spread, take_turns
from pretrain.bench.sections.step import tokens_per_second


def scaling(workshop: Workshop, say: Say) -> Section:
    """ZeRO-1; each rank has a micro-batch, so that the work grows with the ranks (weak scaling).

    On a CPU a rank has cores / (the largest number of ranks) cores, however many ranks there are; those that one rank
    alone leaves idle still lend it their share of the memory's bandwidth and of the clock.
    """
    settings = workshop.settings
    names = {ranks: f"{ranks} rank{'s' * (ranks > 1)}" for ranks in settings.ranks}
    sides = [[workshop.job(name, "project", ranks=ranks, cores_for=settings.ranks[-1])]
             for ranks, name in names.items()]
    turns = take_turns(sides, workshop, say)
    rates = {ranks: tokens_per_second(workshop, turns.seconds(name), settings.preset.steps,
                                      samples=ranks * settings.preset.micro_batch_size)
             for ranks, name in names.items() if name in turns.answers}
    medians = {ranks: statistics.median(values) for ranks, values in rates.items()}
    efficiency = {ranks: rate / ranks / medians[1] for ranks, rate in medians.items() if 1 in medians}
    rows = [[names[ranks], f"{rate:,.0f}", f"{spread(rates[ranks]):.1%}",
             f"{efficiency[ranks]:.1%}" if ranks in efficiency else ""] for ranks, rate in medians.items()]
    each = f"{len(settings.cores_of(0, settings.ranks[-1]))} core(s)" if settings.device.kind == "cpu" else "one GPU"
    return Section("scaling", "Data-parallel ranks, a micro-batch each",
                   ["", "tokens/s", "rounds differ by", "of linear"], rows, [f"Each rank has {each}."], turns.failures,
                   {"tokens_per_second": medians, "rounds": rates, "efficiency": efficiency})
