"""--what recompute: time and memory of each kind of recomputation, compared with none."""

import statistics
from typing import Any

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import InterleavedResults, run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress, spread

NONE = "none"
_OFFLOAD = {"activation_checkpointing": {"cpu_checkpointing": True}}
# name of the row -> (flags of train.py, blocks of the DeepSpeed JSON)
MODES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    NONE: ((), {}),
    "attention": (("--recompute=attention",), {}),
    "mlp": (("--recompute=mlp",), {}),
    "blocks, every 2nd": (("--recompute=blocks", "--recompute_every=2"), {}),
    "blocks": (("--recompute=blocks",), {}),
    "groups of 2 blocks": ((), {"pipeline": {"activation_checkpoint_interval": 2}}),
    "blocks, inputs in host memory": (("--recompute=blocks",), _OFFLOAD),
}


def recompute(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Train with each kind of recomputation in turn: the same model, batch and samples."""
    groups = [[context.job(name, "project", train_flags=flags, blocks=blocks)]
              for name, (flags, blocks) in MODES.items()]
    return recompute_section(run_interleaved(groups, context, report), steps=context.settings.preset.steps)


def recompute_section(results: InterleavedResults, *, steps: int) -> BenchSection:
    """Compute the table and the figures from the answers; a repetition has `steps` steps."""
    title = "Recomputation of activations"
    if NONE not in results.answers:
        return BenchSection("recompute", title, [""], [], [], results.failures)
    reference = results.seconds(NONE)
    rows, figures = [], {}
    for name in (name for name in MODES if name in results.answers):
        seconds, answers = results.seconds(name), results.answers[name]
        figures[name] = {
            "step_time_ms": 1e3 * statistics.median(seconds) / steps,
            "time_ratio": statistics.median(mine / none for mine, none in zip(seconds, reference, strict=True)),
            "peak_memory_bytes": max(answer["peak_memory_bytes"] for answer in answers),
            "first_loss": results.losses(name)[0]}
        memory = figures[name]["peak_memory_bytes"]
        saved = figures[NONE]["peak_memory_bytes"] - memory
        rows.append([name, f"{figures[name]['step_time_ms']:,.1f} ms", f"{spread(seconds):.1%}",
                     f"{figures[name]['time_ratio'] - 1:+.1%}", f"{memory / 2**20:,.0f} MiB",
                     f"{-saved / 2**20:+,.0f} MiB" if saved else ""])
    losses = {values["first_loss"] for values in figures.values()}
    failures = [] if len(losses) == 1 else [f"recompute: the first losses differ: {sorted(losses)}"]
    return BenchSection("recompute", title,
                        ["recomputed", "step", "spread", "time", "peak memory of the process", "difference"], rows,
                        [f"Medians of {len(reference)} interleaved repetitions of {steps} steps."],
                        [*results.failures, *failures], {"modes": figures})
