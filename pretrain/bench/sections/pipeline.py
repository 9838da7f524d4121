"""--what pipeline: 2 stages x 8 micro-batches against the bound of 1F1B."""

import statistics
from typing import Any

from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import Say, Section, spread, take_turns

STAGES, MICRO_BATCHES = 2, 8
PIPELINE, SINGLE = "2 stages x 8 micro-batches", "1 stage on one rank's cores"


def highest_speedup(stages: list[float], micro_batches: int) -> float:
    """Of 1F1B over one device: m sum(t) / (sum(t) + (m - 1) max(t)), t being the stages' work on a micro-batch.

    The first micro-batch goes through all stages; each further one ends the largest stage's time later. Where the
    stages are alike it is m p / (m + p - 1).
    """
    return micro_batches * sum(stages) / (sum(stages) + (micro_batches - 1) * max(stages))


def pipeline(workshop: Workshop, say: Say) -> Section:
    """How near the pipeline comes to 1F1B's bound, its bubble being (p - 1) / (m + p - 1) of the time.

    With p stages on p devices and m micro-batches of time t each on one device, 1F1B takes at least
    (m + p - 1) t / p (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, section 2.2).

    On a GPU machine each stage has a device, and t is that of one stage on one device. On a CPU the ranks share the
    machine: each rank has an equal share of the cores, and t is measured with p separate one-stage engines, one on each
    share, all at work at the same time: what the cores lose by sharing memory and clock is then in both.
    """
    preset = workshop.settings.preset
    micro_batch_size = max(preset.micro_batch_size // 4, 1)
    batch: dict[str, Any] = {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": MICRO_BATCHES}
    singles = [workshop.job(SINGLE if rank == 0 else f"{SINGLE} ({rank})", "project", first_core=rank,
                            cores_for=STAGES, **batch) for rank in range(STAGES)]
    turns = take_turns([[workshop.job(PIPELINE, "project", ranks=STAGES, stages=STAGES, **batch)], singles], workshop,
                       say, steps=max(preset.steps // 2, 1), warmup_steps=1)
    title = f"Pipeline of 2 stages, 8 micro-batches of {micro_batch_size}"
    if len(turns.answers) < 2:
        return Section("pipeline", title, [""], [], [], turns.failures)
    speedups = [single / piped for single, piped in zip(turns.seconds(SINGLE), turns.seconds(PIPELINE), strict=True)]
    speedup = statistics.median(speedups)
    flops = [facts["stage_flops"] for facts in turns.facts[PIPELINE]["ranks"]]
    even, as_cut = highest_speedup([1.0] * STAGES, MICRO_BATCHES), highest_speedup(flops, MICRO_BATCHES)
    rows = [["measured", f"{speedup:.3f}", ""], ["1F1B's bound, stages alike", f"{even:.3f}", f"{speedup / even:.1%}"],
            ["1F1B's bound, stages as cut", f"{as_cut:.3f}", f"{speedup / as_cut:.1%}"]]
    cut = " : ".join(f"{value / sum(flops):.0%}" for value in flops)
    return Section("pipeline", title, ["", "speed-up over one stage", "measured / bound"], rows,
                   [f"Median of {workshop.settings.rounds} rounds, which differ by {spread(speedups):.1%}; "
                    f"the stages have {cut} of the FLOPs."],
                   turns.failures,
                   {"speedup": speedup, "bound": even, "bound_as_cut": as_cut, "of_bound": speedup / even,
                    "of_bound_as_cut": speedup / as_cut, "rounds": speedups, "stage_flops": flops,
                    "seconds": {name: turns.seconds(name) for name in (PIPELINE, SINGLE)}})
