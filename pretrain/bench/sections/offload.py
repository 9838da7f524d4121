"""--what offload: find the fastest "aio" settings of the DeepSpeed JSON for one disk."""

import json
import statistics
from typing import Any

from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress

_SHOWN = 5  # combinations in the table, besides the slowest one
_KEYS = ("block_size", "queue_depth", "intra_op_parallelism")


def offload(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Measure every combination of block size, queue depth and number of threads, in several repetitions.

    Combinations are ranked by the total time for writing some bytes and reading them back, because a training step with
    NVMe offload does both.
    """
    name = "disk"
    results = run_interleaved([[context.job(name, "disk", nvme_path=context.settings.nvme_path)]], context, report,
                              warmup_steps=0, requests=[{}])
    transfers: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for answer in results.answers.get(name, []):
        for transfer in answer["settings"]:
            transfers.setdefault(tuple(transfer[key] for key in _KEYS), []).append(transfer)
    rates = sorted((_median_rates(key, rows) for key, rows in transfers.items()),
                   key=lambda row: row["both_bytes_per_s"], reverse=True)
    if not rates:
        return BenchSection("offload", "NVMe offload", [""], [], [], results.failures)
    aio = {**{key: rates[0][key] for key in _KEYS}, "single_submit": False, "overlap_events": True}
    rows = [[f"{row['block_size'] // 1024} KiB", str(row["queue_depth"]), str(row["intra_op_parallelism"]),
             *(f"{row[f'{direction}_bytes_per_s'] / 1e9:.2f} GB/s" for direction in ("write", "read", "both"))]
            for row in rates]
    return BenchSection("offload", f"NVMe offload: DeepSpeed's aio on {context.settings.nvme_path}",
                        ["block size", "queue depth", "threads", "write", "read", "write and read"],
                        [*rows[:_SHOWN], rows[-1]],
                        [f"The {_SHOWN} fastest of {len(rows)} combinations, and the slowest; medians of "
                         f"{context.settings.repetitions} repetitions.",
                         f'For the DeepSpeed JSON: "aio": {json.dumps(aio)}'],
                        results.failures, {"aio": aio, "settings": rates})


def _median_rates(key: tuple[int, ...], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of one combination and its median rates in bytes per second."""
    write, read = (statistics.median(row[f"{name}_bytes_per_s"] for row in rows) for name in ("write", "read"))
    return {**dict(zip(_KEYS, key, strict=True)), "write_bytes_per_s": write, "read_bytes_per_s": read,
            "both_bytes_per_s": 2 / (1 / write + 1 / read)}
