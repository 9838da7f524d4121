"""--what host: time of Python and of the host per micro-batch, which must not grow with anything but the blocks.

It is measured as the time of a model with the same number of blocks, and therefore of operators, but with so few
elements that its kernels take almost no time. This is an upper bound: small kernels take some time too.
"""

import re
import statistics
from dataclasses import replace

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress
from pretrain.bench.settings import PRESETS

_MICRO_BATCHES = (1, 4, 16)
_BLOCKS = (4, 16)
_LAYERS = re.compile(r"(n_layer|num_hidden_layers)=\d+")
_FULL = "the preset's model"


def host(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure steps of the small model with several numbers of micro-batches and of blocks, and the preset's step."""
    blocks = context.model.num_layers
    counts = {f"{blocks} blocks, {count} micro-batch{'es' * (count > 1)}": (blocks, count) for count in _MICRO_BATCHES}
    counts.update({f"{number} blocks, 16 micro-batches": (number, 16) for number in _BLOCKS if number != blocks})
    small = _small_context(context)
    overrides = small.settings.preset.overrides.format(positions=small.settings.preset.seq_length)
    groups = [[small.job(name, "project", gradient_accumulation_steps=micro_batches,
                         train_flags=("--model_overrides=" + _LAYERS.sub(rf"\g<1>={number}", overrides),))]
              for name, (number, micro_batches) in counts.items()]
    steps = small.settings.preset.steps
    results = run_interleaved(groups, small, report)
    full = run_interleaved([[context.job(_FULL, "project")]], context, report)
    results.failures.extend(full.failures)
    host_ms = {name: 1e3 * statistics.median(results.seconds(name)) / steps / counts[name][1]
               for name in counts if name in results.answers}
    full_ms = 1e3 * statistics.median(full.seconds(_FULL)) / context.settings.preset.steps if full.answers else None
    rows = [[name, f"{value:,.2f} ms", f"{value / counts[name][0]:,.2f} ms",
             f"{1 - value / full_ms:.1%}" if full_ms and counts[name][0] == blocks else ""]
            for name, value in host_ms.items()]
    return BenchSection("host", "Time of the host per micro-batch",
                        ["", "at most", "per block", "kernels' fraction of the preset's micro-batch, at least"], rows,
                        [f"Medians. The preset's micro-batch takes {full_ms:,.1f} ms."] if full_ms else [],
                        results.failures, {"host_ms_per_micro_batch": host_ms, "preset_ms": full_ms})


def _small_context(context: BenchContext) -> BenchContext:
    """Return a context with the small model of the preset's family."""
    settings = context.settings
    small = PRESETS["cpu-small-llama" if "llama" in settings.preset.model else "cpu-small"]
    folder = context.folder / "small"
    folder.mkdir(exist_ok=True)
    return BenchContext(replace(settings, preset=replace(small, steps=2)), folder)
