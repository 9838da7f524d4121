"""--what step: tokens per second, MFU and memory of this project and of other training programs."""

import statistics
from typing import Any

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import InterleavedResults, run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread
from pretrain.model.flops import flops_per_token

PROJECT, PRODUCTS = "this project", "matrix products"
# all but the last two train the model class of transformers; the last one is measured on GPUs only
COMPILED = "plain PyTorch, compiled"
PEERS = {"transformers.Trainer": "trainer", "DeepSpeed, bare loop": "deepspeed", "plain PyTorch": "torch",
         "nanoGPT-style loop": "plain", COMPILED: "plain"}
# relative tolerance of the first loss, which all baselines compute from the same weights and samples
_FIRST_LOSS_TOLERANCE = {"bf16": 1e-3, "fp32": 1e-5}


def training_step(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure this project, other training programs and the machine's rate of matrix products."""
    preset = context.settings.preset
    groups = [[context.job(PRODUCTS, "products", product_size=preset.product_size)],
              [context.job(PROJECT, "project")],
              *([context.job(name, baseline, compiled=name == COMPILED)]
                for name, baseline in peers(context.settings.device.kind).items())]
    return step_section(context, run_interleaved(groups, context, report))


def peers(device_kind: str) -> dict[str, str]:
    """Return the other training programs, and the baseline that runs each of them."""
    return {name: baseline for name, baseline in PEERS.items() if device_kind == "cuda" or name != COMPILED}


def step_section(context: BenchContext, results: InterleavedResults) -> BenchSection:
    """Compute the table and the figures from the answers of the baselines."""
    tflops = max((answer["tflops"] for answer in results.answers.get(PRODUCTS, [])), default=None)
    figures = {name: _figures(name, context, results, tflops)
               for name in (PROJECT, *PEERS) if name in results.answers}
    ours = figures.get(PROJECT)
    for values in figures.values():
        # of two rates that were measured shortly after each other
        values["speed_ratios"] = ours and [mine / theirs for mine, theirs in
                                           zip(ours["rounds"], values["rounds"], strict=True)]
        values["speed_ratio"] = ours and statistics.median(values["speed_ratios"])
        values["memory_ratio"] = ours and ours["peak_memory_bytes"] / values["peak_memory_bytes"]
    mismatches = _mismatches(figures, context.settings.precision)
    return BenchSection(
        name="step", title="Training step",
        columns=["", "tokens/s", "spread", "TFLOP/s", "MFU", "peak memory", "tokens/s, ours / theirs",
                 "memory, ours / theirs", "first loss"],
        rows=[_row(name, values) for name, values in figures.items()], notes=_notes(context, tflops),
        failures=[*results.failures, *mismatches],
        data={"contenders": figures, "matmul_tflops": tflops, "same_work": not mismatches,
              "flops_per_token": flops_per_token(context.model, context.settings.preset.seq_length)})


def tokens_per_second(context: BenchContext, seconds: list[float], steps: int, *, samples: int) -> list[float]:
    """Return the rate of each repetition. `seconds` are their times, and `samples` is the global batch size."""
    return [steps * samples * context.settings.preset.seq_length / value for value in seconds]


def _figures(name: str, context: BenchContext, results: InterleavedResults, tflops: float | None) -> dict[str, Any]:
    """Return the figures of one baseline. `tflops` is the machine's rate of matrix products in TFLOP/s."""
    preset = context.settings.preset
    rates = tokens_per_second(context, results.seconds(name), preset.steps, samples=preset.micro_batch_size)
    rate, answers = statistics.median(rates), results.answers[name]
    flops = flops_per_token(context.model, preset.seq_length)
    return {
        "tokens_per_second": rate, "rounds": rates, "parameters": results.facts[name]["parameters"],
        "mfu": tflops and rate * flops / tflops / 1e12,
        **{key: max(answer[key] for answer in answers) for key in
           ("peak_memory_bytes", "resident_bytes", "reserved_bytes") if key in answers[0]},
        "tflops": rate * flops / 1e12, "losses": results.losses(name),
    }


def _mismatches(figures: dict[str, dict[str, Any]], precision: str) -> list[str]:
    """Return one line for each baseline that does not do the same work: its model size or its first loss differs."""
    ours, lines = figures.get(PROJECT), []
    for name, values in figures.items() if ours else ():
        assert ours is not None
        difference = abs(values["losses"][0] / ours["losses"][0] - 1)
        if not difference <= _FIRST_LOSS_TOLERANCE[precision]:  # also true for NaN
            lines.append(f"{name}: does not do the same work as this project: its first loss is "
                         f"{values['losses'][0]:.6f}, this project's {ours['losses'][0]:.6f}")
        if values["parameters"] != ours["parameters"]:
            lines.append(f"{name}: does not do the same work as this project: it has {values['parameters']:,} "
                         f"parameters, this project {ours['parameters']:,}")
    return lines


def _row(name: str, values: dict[str, Any]) -> list[str]:
    def ratio(key: str, digits: int = 2) -> str:
        return "" if values[key] is None else f"{values[key]:.{digits}f}"

    ratios = values["speed_ratios"]
    lowest_to_highest = f" ({min(ratios):.2f} to {max(ratios):.2f})" if ratios and name != PROJECT else ""
    return [name, f"{values['tokens_per_second']:,.0f}", f"{spread(values['rounds']):.1%}", f"{values['tflops']:.3g}",
            ratio("mfu", 3), f"{values['peak_memory_bytes'] / 1e9:.2f} GB", ratio("speed_ratio") + lowest_to_highest,
            ratio("memory_ratio"), f"{values['losses'][0]:.4f}"]


def _notes(context: BenchContext, tflops: float | None) -> list[str]:
    settings = context.settings
    memory = "growth of the resident memory since before the model was built" if settings.device.kind == "cpu" else \
        "peak of torch's allocator"
    notes = [f"tokens/s: median of {settings.repetitions} repetitions of {settings.preset.steps} steps; spread: "
             f"(highest - lowest) / median; ours / theirs: median, lowest and highest ratio of the "
             f"repetitions; peak memory: {memory}."]
    if tflops is not None:
        notes.append(f"MFU: fraction of {tflops:.3g} TFLOP/s, the highest measured rate of {settings.precision} "
                     f"products of matrices with {settings.preset.product_size:,} rows, in the same repetitions.")
    if not settings.preset.side_by_side:
        notes.append("The repetitions are not interleaved, because the baselines do not fit on one device together.")
    return notes
