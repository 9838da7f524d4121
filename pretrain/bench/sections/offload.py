"""--what offload: the "aio" block for a DeepSpeed JSON that suits this disk."""

import json
import statistics
from typing import Any

from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import Say, Section, take_turns

_SHOWN = 5
_KEYS = ("block_size", "queue_depth", "intra_op_parallelism")


def offload(workshop: Workshop, say: Say) -> Section:
    """Every combination of block size, queue depth and threads, in turns; the best has the least time for a write and
    a read of the same bytes together, as a step of NVMe offload does both."""
    name = "disk"
    turns = take_turns([[workshop.job(name, "disk", nvme_path=workshop.settings.nvme_path)]], workshop, say,
                       warmup_steps=0, requests=[{}])
    settings: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for answer in turns.answers.get(name, []):
        for row in answer["settings"]:
            settings.setdefault(tuple(row[key] for key in _KEYS), []).append(row)
    results = sorted((_result(key, rows) for key, rows in settings.items()), key=lambda row: row["both_bytes_per_s"],
                     reverse=True)
    if not results:
        return Section("offload", "NVMe offload", [""], [], [], turns.failures)
    aio = {**{key: results[0][key] for key in _KEYS}, "single_submit": False, "overlap_events": True}
    rows = [[f"{row['block_size'] // 1024} KiB", str(row["queue_depth"]), str(row["intra_op_parallelism"]),
             *(f"{row[f'{kind}_bytes_per_s'] / 1e9:.2f} GB/s" for kind in ("write", "read", "both"))]
            for row in results]
    return Section("offload", f"NVMe offload: DeepSpeed's aio on {workshop.settings.nvme_path}",
                   ["block", "queue depth", "threads", "write", "read", "both"], [*rows[:_SHOWN], rows[-1]],
                   [f"The {_SHOWN} best of {len(rows)} settings, and the last; medians of {workshop.settings.rounds} "
                    "rounds.", f'For the DeepSpeed JSON: "aio": {json.dumps(aio)}'],
                   turns.failures, {"aio": aio, "settings": results})


def _result(key: tuple[int, ...], rows: list[dict[str, Any]]) -> dict[str, Any]:
    write, read = (statistics.median(row[f"{kind}_bytes_per_s"] for row in rows) for kind in ("write", "read"))
    return {**dict(zip(_KEYS, key, strict=True)), "write_bytes_per_s": write, "read_bytes_per_s": read,
            "both_bytes_per_s": 2 / (1 / write + 1 / read)}
