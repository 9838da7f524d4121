"""Sections that compare training steps in one kind of table: --what step, overhead, pipeline, scaling and recompute."""

import statistics
from typing import Any

from pretrain.bench.processes import BenchContext, InterleavedResults, JobGroup, ReportProgress, run_interleaved
from pretrain.bench.report import BenchSection, spread
from pretrain.model.flops import flops_per_token

PROJECT, PRODUCTS = "this project", "matrix products"
# all but the last two train the model class of transformers; the last one is measured on GPUs only
COMPILED = "plain PyTorch, compiled"
PEERS = {"transformers.Trainer": "trainer", "DeepSpeed, bare loop": "deepspeed_loop",
         "plain PyTorch": "plain_transformers", "nanoGPT-style loop": "plain_modules", COMPILED: "plain_modules"}
# relative tolerance of the first loss, which all baselines compute from the same weights and samples
_FIRST_LOSS_TOLERANCE = {"bf16": 1e-3, "fp32": 1e-5}
LOOP, BARE = "step loop", "bare engine"
LOG_INTERVAL = 10  # default of --log_interval; a repetition has so many steps that at least one is logged
STAGES, MICRO_BATCHES = 2, 8
PIPELINE, SINGLE = "2 stages x 8 micro-batches", "1 stage on one rank's cores"
NO_RECOMPUTATION = "none"
# row of --what recompute -> (flags of train.py, blocks of the DeepSpeed JSON)
MODES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    NO_RECOMPUTATION: ((), {}),
    "attention": (("--recompute=attention",), {}),
    "mlp": (("--recompute=mlp",), {}),
    "blocks, every 2nd": (("--recompute=blocks", "--recompute_every=2"), {}),
    "blocks": (("--recompute=blocks",), {}),
    "groups of 2 blocks": ((), {"pipeline": {"activation_checkpoint_interval": 2}}),
    "blocks, inputs in host memory": (("--recompute=blocks",),
                                      {"activation_checkpointing": {"cpu_checkpointing": True}}),
}


def training_step(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure this project, other training programs and the machine's rate of matrix products."""
    groups = [[context.job(PRODUCTS, "peers.products", product_size=context.settings.preset.product_size)],
              [context.job(PROJECT, "project.project")],
              *([context.job(name, f"peers.{baseline}", compiled=name == COMPILED)]
                for name, baseline in peers(context.settings.device.kind).items())]
    return compare("step", "Training step", PROJECT, context, run_interleaved(groups, context, report))


def peers(device_kind: str) -> dict[str, str]:
    """Return the other training programs, and the function of peers.py that runs each of them."""
    return {name: baseline for name, baseline in PEERS.items() if device_kind == "cuda" or name != COMPILED}


def overhead(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare `pretrain.trainer.train` with direct calls of the same engine, which always get the same batch.

    The step loop reads data, logs at the default interval, checks for signals, and has all guards. It neither saves nor
    evaluates.
    """
    steps = max(context.settings.preset.steps, LOG_INTERVAL)
    groups: list[JobGroup] = [[context.job(LOOP, "project.loop")], [context.job(BARE, "project.bare_engine")]]
    results = run_interleaved(groups, context, report, steps=steps)
    return compare("overhead", "Overhead of the step loop", LOOP, context, results, steps=steps)


def pipeline(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare the pipeline's speed-up with 1F1B's bound, whose bubble is (p - 1) / (m + p - 1) of the time.

    Let t be the time of one micro-batch on one device without a pipeline. With p stages on p devices and m
    micro-batches, 1F1B takes at least (m + p - 1) t / p (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv
    2104.04473, section 2.2).

    t is measured with p separate engines without a pipeline, which work at the same time. On GPUs each engine has one
    device. On a CPU each engine has an equal part of the cores, like a pipeline stage. So the times with and without a
    pipeline both include the slowdown from sharing memory bandwidth and clock rate.
    """
    micro_batch_size = max(context.settings.preset.micro_batch_size // 4, 1)
    batch: dict[str, Any] = {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": MICRO_BATCHES}
    singles = [context.job(SINGLE if rank == 0 else f"{SINGLE} ({rank})", "project.project", first_part=rank,
                           core_parts=STAGES, **batch) for rank in range(STAGES)]
    staged = context.job(PIPELINE, "project.project", ranks=STAGES, blocks={"pipeline": {"stages": STAGES}}, **batch)
    steps = max(context.settings.preset.steps // 2, 1)
    results = run_interleaved([[staged], singles], context, report, steps=steps, warmup_steps=1)
    section = compare("pipeline", f"Pipeline of 2 stages, 8 micro-batches of {micro_batch_size}", PIPELINE, context,
                      results, steps=steps, samples={PIPELINE: micro_batch_size * MICRO_BATCHES,
                                                     SINGLE: micro_batch_size * MICRO_BATCHES})
    if len(results.answers) == 2:
        flops = [facts["stage_flops"] for facts in results.facts[PIPELINE]["ranks"]]
        speedup = section.data["contenders"][SINGLE]["speed_ratio"]
        for stages, work in (("equal stages", [1.0] * STAGES), ("the actual stages", flops)):
            bound = highest_speedup(work, MICRO_BATCHES)
            section.notes.append(f"1F1B's bound with {stages}: {bound:.3f} times the speed of one stage; measured / "
                                 f"bound: {speedup / bound:.1%}.")
            section.data["bound" if stages == "equal stages" else "bound_as_cut"] = bound
        fractions = " : ".join(f"{value / sum(flops):.0%}" for value in flops)
        section.notes.append(f"The stages have {fractions} of the FLOPs.")
        section.data.update(speedup=speedup, stage_flops=flops)
    return section


def highest_speedup(stage_work: list[float], micro_batches: int) -> float:
    """Upper bound of 1F1B's speed-up over one device: m sum(t) / (sum(t) + (m - 1) max(t)).

    Here t is the list of the stages' work on one micro-batch, and m is the number of micro-batches. The first
    micro-batch passes through all stages. Each further micro-batch finishes later by the time of the slowest
    stage. With p equal stages the bound is m p / (m + p - 1).
    """
    return micro_batches * sum(stage_work) / (sum(stage_work) + (micro_batches - 1) * max(stage_work))


def scaling(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure weak scaling with ZeRO-1: each rank has one micro-batch, so the work grows with the number of ranks.

    On a CPU each rank has cores / (largest number of ranks) cores. With fewer ranks some cores are idle, and the other
    ranks can use the memory bandwidth and the clock rate of the idle cores.
    """
    settings = context.settings
    names = {f"{ranks} rank{'s' * (ranks > 1)}": ranks for ranks in settings.rank_counts}
    groups = [[context.job(name, "project.project", ranks=ranks, core_parts=settings.rank_counts[-1])]
              for name, ranks in names.items()]
    section = compare("scaling", "Data-parallel ranks, one micro-batch each", next(iter(names)), context,
                      run_interleaved(groups, context, report), same_samples=False,
                      samples={name: ranks * settings.preset.micro_batch_size for name, ranks in names.items()})
    rates = {name: values["tokens_per_second"] / names[name] for name, values in section.data["contenders"].items()}
    efficiency = {names[name]: rate / next(iter(rates.values())) for name, rate in rates.items()}
    cores = len(settings.cores_of(0, settings.rank_counts[-1]))
    device = f"{cores} core(s)" if settings.device.kind == "cpu" else "one GPU"
    section.notes.append(f"Each rank has {device}. Tokens/s per rank, compared with the first row: "
                         + ", ".join(f"{value:.1%} on {ranks}" for ranks, value in efficiency.items()) + ".")
    section.data["efficiency"] = efficiency
    return section


def recompute(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Train with each kind of recomputation in turn: the same model, batch and samples."""
    groups = [[context.job(name, "project.project", train_flags=flags, blocks=blocks)]
              for name, (flags, blocks) in MODES.items()]
    return compare("recompute", "Recomputation of activations", NO_RECOMPUTATION, context,
                   run_interleaved(groups, context, report))


def compare(name: str, title: str, reference: str, context: BenchContext, results: InterleavedResults, *,
            steps: int | None = None, samples: dict[str, int] | None = None, same_samples: bool = True) -> BenchSection:
    """Compute the table and the figures of training steps; ratios are those of the reference and a row.

    Args:
        steps: of a repetition (default: the preset's).
        samples: of a step, by row (default: one micro-batch).
        same_samples: whether all rows train on the same samples: then a row with another first loss is a failure.
    """
    settings, preset = context.settings, context.settings.preset
    answers = {row: found for row, found in results.answers.items() if row != PRODUCTS}
    tflops = max((answer["tflops"] for answer in results.answers.get(PRODUCTS, [])), default=None)
    flops, figures = flops_per_token(context.model, preset.seq_length), dict[str, dict[str, Any]]()
    for row, found in answers.items():
        tokens = (steps or preset.steps) * (samples or {}).get(row, preset.micro_batch_size) * preset.seq_length
        rates = [tokens / answer["seconds"] for answer in found]
        rate = statistics.median(rates)
        figures[row] = {
            "tokens_per_second": rate, "rounds": rates, "parameters": results.facts[row]["parameters"],
            "step_time_ms": 1e3 * statistics.median(results.seconds(row)) / (steps or preset.steps),
            "mfu": tflops and rate * flops / tflops / 1e12, "tflops": rate * flops / 1e12,
            "losses": results.losses(row),
            **{key: max(answer[key] for answer in found) for key in
               ("peak_memory_bytes", "resident_bytes", "reserved_bytes") if key in found[0]}}
    ours = figures.get(reference)
    for values in figures.values() if ours else ():
        assert ours is not None
        # of two rates that were measured shortly after each other
        values["speed_ratios"] = [mine / theirs for mine, theirs in zip(ours["rounds"], values["rounds"], strict=True)]
        values["speed_ratio"] = statistics.median(values["speed_ratios"])
        values["memory_ratio"] = ours["peak_memory_bytes"] / values["peak_memory_bytes"]
    mismatches = _mismatches(figures, reference, settings.precision) if ours and same_samples else []
    memory = "growth of the resident memory since before the model was built" if settings.device.kind == "cpu" else \
        "peak of torch's allocator"
    whose = "ours" if reference == PROJECT else reference
    columns = ["", "tokens/s", "spread", "ms/step", "TFLOP/s", *(["MFU"] if tflops else []), "peak memory",
               f"tokens/s, {whose} / row", f"memory, {whose} / row", "first loss"]
    notes = [f"tokens/s: median of {settings.repetitions} repetitions of {steps or preset.steps} steps; spread: "
             "(highest - lowest) / median; ratios: median, lowest and highest of the repetitions; peak memory: "
             f"{memory}."]
    if tflops is not None:
        notes.append(f"MFU: fraction of {tflops:.3g} TFLOP/s, the highest measured rate of {settings.precision} "
                     f"products of matrices with {preset.product_size:,} rows, in the same repetitions.")
    if not preset.side_by_side:
        notes.append("The repetitions are not interleaved, because the baselines do not fit on one device together.")
    return BenchSection(name, title, columns, [_row(row, values) for row, values in figures.items()], notes,
                        [*results.failures, *mismatches],
                        {"contenders": figures, "matmul_tflops": tflops, "same_work": not mismatches,
                         "flops_per_token": flops})


def _mismatches(figures: dict[str, dict[str, Any]], reference: str, precision: str) -> list[str]:
    """Return one line for each baseline that does not do the same work: its model size or its first loss differs."""
    ours, lines = figures[reference], []
    for name, values in figures.items():
        difference = abs(values["losses"][0] / ours["losses"][0] - 1)
        if not difference <= _FIRST_LOSS_TOLERANCE[precision]:  # also true for NaN
            lines.append(f"{name}: does not do the same work as {reference}: its first loss is "
                         f"{values['losses'][0]:.6f}, that of {reference} {ours['losses'][0]:.6f}")
        elif reference == PROJECT and values["parameters"] != ours["parameters"]:
            lines.append(f"{name}: does not do the same work as {reference}: it has {values['parameters']:,} "
                         f"parameters, {reference} {ours['parameters']:,}")
    return lines


def _row(name: str, values: dict[str, Any]) -> list[str]:
    ratios = values.get("speed_ratios")
    return [name, f"{values['tokens_per_second']:,.0f}", f"{spread(values['rounds']):.1%}",
            f"{values['step_time_ms']:,.1f}", f"{values['tflops']:.3g}",
            *([] if values["mfu"] is None else [f"{values['mfu']:.3f}"]),
            f"{values['peak_memory_bytes'] / 1e6:,.0f} MB",
            f"{values['speed_ratio']:.3f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "",
            f"{values['memory_ratio']:.2f}" if ratios else "", f"{values['losses'][0]:.4f}"]
