"""The sections of `python tools/bench.py`: all of them in turn, and those about training steps and checkpoints."""

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.model.flops import flops_per_token
from tools.benchmarks.data import data
from tools.benchmarks.processes import (
    SAVE_INTERVAL_S,
    BenchContext,
    InterleavedResults,
    ReportProgress,
    run_interleaved,
)
from tools.benchmarks.profile import PROJECT, profile
from tools.benchmarks.report import BenchSection, spread
from tools.benchmarks.settings import BenchSettings
from tools.benchmarks.startup import startup
from tools.benchmarks.store import store

PRODUCTS = "matrix products"
PEERS = {"transformers.Trainer": "trainer", "DeepSpeed, bare loop": "deepspeed_loop", "plain PyTorch": "plain"}
COMPILED = "plain PyTorch, compiled"  # on GPUs only
# relative tolerance of the first loss, which all baselines compute from the same weights and samples
_FIRST_LOSS_TOLERANCE = {"bf16": 1e-3, "fp32": 1e-5}
LOOP, BARE = "step loop", "bare engine"
LOG_INTERVAL = 10  # default of --log_interval; a repetition has so many steps that at least one is logged
_STEPS_BEFORE_SAVE = 3  # timed


def run_sections(settings: BenchSettings, report: ReportProgress) -> Iterator[BenchSection]:
    """Yield each section as soon as it is measured. Raises ConfigError before the first measurement."""
    measure: dict[str, Callable[[BenchContext, ReportProgress], BenchSection]] = {
        "step": training_step, "profile": profile, "overhead": overhead,
        "determinism": determinism, "checkpoint": checkpoint, "startup": startup, "data": data, "store": store,
        "control": control}
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-bench-") as folder:
        context = BenchContext(settings, Path(folder))
        context.job("validated", "project.project").plan()  # raises ConfigError
        for name in settings.sections:
            yield measure[name](context, lambda text, name=name: report(f"{name}: {text}"))  # type: ignore[misc]


def control(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Count what each phase of a run of many ranks asks of storage and of other ranks."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints a line when it is imported, and --json has none
        from tools.benchmarks.control import control as count
    return count(context, report)


def training_step(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure this project, other training programs and the machine's rate of matrix products."""
    settings = context.settings
    jobs = [context.job(PRODUCTS, "worker.products", product_size=settings.preset.product_size,
                        precision=settings.precision),
            context.job(PROJECT, "project.project"),
            *(context.job(name, f"peers.{main}") for name, main in PEERS.items()),
            *([context.job(COMPILED, "peers.plain", compiled=True)] if settings.device.kind == "cuda" else [])]
    return compare("step", "Training step", PROJECT, context, run_interleaved(jobs, context, report))


def overhead(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare `pretrain.trainer.train` with direct calls of the same engine, which always get the same batch.

    The step loop reads data, logs at the default interval, checks for signals, and has all guards. It neither saves nor
    evaluates.
    """
    steps = max(context.settings.preset.steps, LOG_INTERVAL)
    jobs = [context.job(LOOP, "project.loop"), context.job(BARE, "project.bare_engine")]
    results = run_interleaved(jobs, context, report, steps=steps)
    return compare("overhead", "Overhead of the step loop", LOOP, context, results, steps=steps)


def determinism(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Compare the step loop with the same one under --deterministic, and with a recomputed micro-batch in each step.

    On one rank the micro-batch is recomputed on the same device. A step has one micro-batch.
    """
    steps = max(context.settings.preset.steps, LOG_INTERVAL)
    jobs = [context.job(LOOP, "project.loop"), *(
        replace(job, flags=(*job.flags, *flags)) for flags in (("--deterministic",), ("--recompute_interval=1",))
        for job in [context.job(" ".join(flags).replace("=", " "), "project.loop")])]
    results = run_interleaved(jobs, context, report, steps=steps)
    return compare("determinism", "Reproducible bits", LOOP, context, results, steps=steps)


def compare(name: str, title: str, reference: str, context: BenchContext, results: InterleavedResults, *,
            steps: int | None = None) -> BenchSection:
    """Compute the table and the figures of training steps; each ratio compares the reference and a row.

    `steps`: of a repetition (default: the preset's).
    """
    settings, preset = context.settings, context.settings.preset
    steps = steps or preset.steps
    answers = {row: found for row, found in results.answers.items() if row != PRODUCTS}
    tflops = max((answer["tflops"] for answer in results.answers.get(PRODUCTS, [])), default=None)
    flops, figures = flops_per_token(context.model, preset.seq_length), dict[str, dict[str, Any]]()
    tokens = steps * preset.micro_batch_size * preset.seq_length
    for row, found in answers.items():
        rates = [tokens / answer["seconds"] for answer in found]
        rate = statistics.median(rates)
        figures[row] = {
            "tokens_per_second": rate, "rounds": rates, "parameters": results.parameters[row],
            "step_time_ms": 1e3 * statistics.median(answer["seconds"] for answer in found) / steps,
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
        peak = values["peak_memory_bytes"]  # 0 if torch's allocator is off (PYTORCH_NO_CUDA_MEMORY_CACHING)
        values["memory_ratio"] = ours["peak_memory_bytes"] / peak if peak else None
    mismatches = _mismatches(figures, reference, settings.precision) if ours else []
    memory = "growth of the resident memory since before the model was built" if settings.device.kind == "cpu" else \
        "peak of torch's allocator"
    whose = "ours" if reference == PROJECT else reference
    columns = ["", "tokens/s", "spread", "ms/step", "TFLOP/s", *(["MFU"] if tflops else []), "peak memory",
               f"tokens/s, {whose} / row", f"memory, {whose} / row", "first loss"]
    notes = [f"tokens/s: median of {settings.repetitions} repetitions of {steps} steps; spread: "
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
        difference = abs(values["losses"][0] - ours["losses"][0]) / (abs(ours["losses"][0]) or 1)
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
            f"{values['memory_ratio']:.2f}" if ratios and values["memory_ratio"] else "", f"{values['losses'][0]:.4f}"]


def checkpoint(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Save checkpoints with the step loop's `Saver`, alternately synchronously and in the background, and load them.

    The rate of the disk is measured in the same repetition, in the same folder. The stall is the time of `Saver.save`,
    until the device is idle again. A background save also slows down the steps that run during the save, because it
    uses cores and the disk. The slowdown is the sum of the additional times of these steps. The stall and the slowdown
    are also reported as a fraction of SAVE_INTERVAL_S.
    """
    job = context.job("checkpoints", "project.checkpoint")
    results = run_interleaved([job], context, report, steps=_STEPS_BEFORE_SAVE, warmup_steps=0)
    answers = [answer["figures"] for answer in results.answers.get(job.name, [])]
    if not answers:
        return BenchSection("checkpoint", "Checkpoints", [""], [], [], results.failures)
    measured = answers[1:] or answers  # the first repetition also creates folders and buffers
    medians: dict[str, Any] = {label: {key: statistics.median(figures[label][key] for figures in measured)
                                       for key in measured[0][label]} for label in measured[0]}
    disk, num_bytes = medians.pop("disk"), medians["synchronous save"].pop("checkpoint_bytes")
    rows = [["disk, write and fsync", _rate(disk["write"]), "", "", ""],
            ["disk, read", _rate(disk["read"]), "", "", ""],
            *([label, _rate(figures["bytes_per_s"]), f"{figures['of_disk']:.2f}",
               *([f"{figures['blocking_s']:.2f} s", f"{figures['total_share']:.3%}"] if "blocking_s" in figures
                 else ["", ""])] for label, figures in medians.items())]
    notes = [f"A checkpoint has {num_bytes / 1e9:.2f} GB. The disk writes and reads one file of this size, like dd "
             "with bs=1M and conv=fsync. Files are read from the disk, and not from the page cache.",
             "Verification compares SHA-256 hashes. Training continues during --async_save. Fractions are of "
             f"{SAVE_INTERVAL_S / 60:.0f} minutes between two saves. All figures are medians; the first of several "
             "repetitions is left out."]
    return BenchSection("checkpoint", "Checkpoints", ["", "rate", "of the disk's rate", "stall of training",
                                                      "stall and slowdown, fraction"], rows, notes, results.failures,
                        {"disk": disk, "checkpoint_bytes": num_bytes, **medians})


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
