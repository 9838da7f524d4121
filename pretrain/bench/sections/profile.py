"""--what profile: where the time of a training step goes, per kind of operator and per operator, by torch.profiler."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from pretrain.bench.baselines.operator_kinds import HOST, KINDS
from pretrain.bench.processes.context import BenchContext
from pretrain.bench.processes.interleave import InterleavedResults, run_interleaved
from pretrain.bench.sections.section import BenchSection, ReportProgress

PROJECT, PLAIN = "this project", "nanoGPT-style loop"
_HEADERS = {PROJECT: "ours", PLAIN: "nanoGPT"}
_BASELINES = {PROJECT: "profile", PLAIN: "plain_profile"}
_LONGEST_NAME = 32
_LEAST_FRACTION = 0.005  # of a step: operators with a row of their own take at least as much


@dataclass
class _Sums:
    """Sums of a kind or of an operator in one step."""

    time_ms: float = 0.0
    calls: int = 0
    bytes: int = 0
    flops: int = 0

    def add(self, row: dict[str, Any]) -> None:
        self.time_ms += row["self_time_ms"]
        self.calls += row["calls"]
        self.bytes += row["bytes"]
        self.flops += row["flops"]


_Profile = dict[tuple[str, str], _Sums]  # (kind, operator), and (kind, "") for the sum of a kind


def profile(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Profile the training steps of this project and of the nanoGPT-style loop."""
    groups = [[context.job(f"{name}, profiled", baseline)] for name, baseline in _BASELINES.items()]
    results = run_interleaved(groups, context, report, requests=[{"steps": 1}])
    return profile_section(results)


def profile_section(results: InterleavedResults) -> BenchSection:
    """Compute the table and the figures from the answers. Each repetition has one step."""
    profiles = {name: _sums(answers) for name in _BASELINES if (answers := results.answers.get(f"{name}, profiled"))}
    totals = {name: sum(sums.time_ms for (_, operator), sums in found.items() if not operator)
              for name, found in profiles.items()}
    columns = ["", *(column for name in profiles for column in
                     (f"{_HEADERS[name]}: ms", "fraction", "calls", "GB", "rate"))]
    rows = [[f"- {_short(key[1])}" if key[1] else key[0],
             *(cell for name, found in profiles.items() for cell in _cells(found.get(key), totals[name]))]
            for key in _shown(profiles, totals)]
    rows.append(["sum", *(cell for name in profiles for cell in (f"{totals[name]:,.1f}", "", "", "", ""))])
    repetitions = max((len(answers) for answers in results.answers.values()), default=0)
    return BenchSection("profile", "Time of a training step by operator", columns, rows if profiles else [],
                        _notes(repetitions), results.failures,
                        page_rows=[row for row in rows if not row[0].startswith("- ")], data=_data(profiles, totals))


def _sums(answers: list[dict[str, Any]]) -> _Profile:
    """Return the sums of the fastest step, which other load on the machine has disturbed least."""
    steps = [answer["operators"] for answer in answers]
    found: _Profile = defaultdict(_Sums)
    for row in min(steps, key=lambda rows: sum(row["self_time_ms"] for row in rows)):
        for operator in (row["name"], ""):
            found[row["kind"], operator].add(row)
    return dict(found)


def _shown(profiles: dict[str, _Profile], totals: dict[str, float]) -> list[tuple[str, str]]:
    """Return the kinds, each followed by its operators that take the most time in one of the programs."""
    def fraction(key: tuple[str, str]) -> float:
        return max(found[key].time_ms / totals[name] for name, found in profiles.items() if key in found)

    keys = {key for found in profiles.values() for key in found}
    shown = []
    for kind in KINDS:
        operators = [key for key in keys if key[0] == kind and key[1] and kind != HOST]
        shown += [(kind, "")] if (kind, "") in keys else []
        shown += sorted((key for key in operators if fraction(key) >= _LEAST_FRACTION), key=fraction, reverse=True)
    return shown


def _short(name: str) -> str:
    """Shorten the name of an operator of torch or of a CUDA kernel."""
    name = name.removeprefix("aten::").replace("_scaled_dot_product_flash_attention_for_cpu", "sdpa")
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _cells(sums: _Sums | None, total_ms: float) -> list[str]:
    if sums is None or not total_ms:
        return [""] * 5
    if sums.flops:
        rate = f"{sums.flops / sums.time_ms / 1e9:.2f} TFLOP/s"
    else:
        rate = f"{sums.bytes / sums.time_ms / 1e6:.1f} GB/s" if sums.bytes else ""
    return [f"{sums.time_ms:,.1f}", f"{sums.time_ms / total_ms:.1%}", f"{sums.calls:,.0f}",
            f"{sums.bytes / 1e9:.2f}" if sums.bytes else "", rate]


def _notes(repetitions: int) -> list[str]:
    return [f"ours: {PROJECT}; nanoGPT: {PLAIN}. The fastest of {repetitions} profiled steps; the profiler adds some "
            "microseconds to each call. The time of an operator does not include operators that it calls.",
            "c::NAME: a C function of this project; names without :: are torch's operators. Copies and elementwise "
            "operators of logits count as loss; clipping and weight casts of the update count as optimizer.",
            "GB: bytes of the operator's tensors, by their recorded shapes; lists of tensors have none. Caches are "
            "not considered. Fused attention includes its matrix products."]


def _data(profiles: dict[str, _Profile], totals: dict[str, float]) -> dict[str, Any]:
    """Return the figures of this project's operators and of the kinds of both programs."""
    def figures(name: str, key: tuple[str, str]) -> dict[str, Any]:
        sums = profiles[name][key]
        return {"kind": key[0], "time_ms_per_step": sums.time_ms, "fraction": sums.time_ms / totals[name],
                "calls_per_step": sums.calls, "bytes_per_step": sums.bytes, "flops_per_step": sums.flops}

    operators = [{"name": key[1], **figures(PROJECT, key)} for key in profiles.get(PROJECT, ()) if key[1]]
    return {"operators": sorted(operators, key=lambda row: -row["time_ms_per_step"]), "step_time_ms": totals,
            "kinds": {name: [figures(name, key) for key in found if not key[1]] for name, found in profiles.items()}}
