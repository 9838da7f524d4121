"""What tools/compare_zero.py does: flags -> layouts -> rows -> table, files."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pretrain.distributed.device import detect_device
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import read_shape, shape_of
from pretrain.memory.hardware import GB, GIB, Cluster
from pretrain.memory.report.compare_zero_flags import DEFAULT_SEQ_LENGTH, axes_of, cluster_of, parse_flags
from pretrain.memory.report.plot import save_plot
from pretrain.memory.report.table import Report, largest_json, print_largest, print_report, report_csv, report_json
from pretrain.memory.search.candidates import (
    Candidate,
    CandidateSet,
    generate_candidates,
    group_micro_batches,
    read_candidates,
)
from pretrain.memory.search.compare import ComparisonRow, Workload, compare, recommend
from pretrain.memory.search.ds_config import write_config
from pretrain.memory.search.largest_fit import find_largest
from pretrain.memory.sizes import in_unit
from pretrain.memory.step_time.run_cost import cost_lines, run_cost
from pretrain.memory.step_time.time_model import LINK_EFFICIENCY
from pretrain.model.config import load_model_config


def main(argv: list[str] | None = None) -> None:
    """Raises ConfigError for wrong or impossible input."""
    flags = parse_flags(sys.argv[1:] if argv is None else argv)
    workload = workload_of(flags)
    found = combinations_of(flags, workload, _device_kind(flags.mode))
    if flags.mode != "estimate":
        # judges whole runs, which takes numpy
        from pretrain.memory.report.estimate_check import observe_all, observed_json, print_observed, say_to_stderr

        observed = observe_all(_one_of_each(found), workload, flags, say_to_stderr)
        if not _emit(flags.json, lambda: observed_json(observed)):
            print_observed(observed, flags.unit or "MiB")
        return
    if flags.find:
        largest = find_largest(flags.find, _one_of_each(found), workload)
        if not _emit(flags.json, lambda: largest_json(largest)):
            print_largest(largest, _search_lines(flags, workload, found))
        return
    report = make_report(flags, workload, found)
    printed = _emit(flags.json, lambda: report_json(report)) | _emit(flags.csv, lambda: report_csv(report))
    if not printed:
        print_report(report, _unit(flags, workload.cluster))
    if flags.plot:
        save_plot(flags.plot, report)
    if flags.write:
        _write(flags.write, report)


def workload_of(flags: argparse.Namespace) -> Workload:
    """The model and the machines of the flags."""
    cluster = cluster_of(flags)
    if flags.model is None:
        return Workload(cluster, flags.num_parameters, name=f"{flags.num_parameters / 1e9:,.4g} B parameters",
                       kernel_efficiency=flags.kernel_efficiency)
    shape = shape_of(load_model_config(flags.model, flags.model_overrides)) if flags.model_overrides else \
        read_shape(flags.model)
    model = None if shape.untrainable_reason else load_model_config(flags.model, flags.model_overrides)
    return Workload(cluster, shape.num_parameters(), shape, model, flags.model, flags.kernel_efficiency)


def _device_kind(mode: str) -> str:
    """Whose kernels the activations are those of: simulations compute as a CPU does."""
    return {"estimate": "cuda", "simulate": "cpu"}.get(mode) or detect_device().kind


def combinations_of(flags: argparse.Namespace, workload: Workload, device_kind: str) -> CandidateSet:
    """The layouts that the flags ask for."""
    positions = workload.shape.max_positions if workload.shape else DEFAULT_SEQ_LENGTH
    seq_length = min(DEFAULT_SEQ_LENGTH, positions)
    if not flags.configs:
        axes = axes_of(flags, seq_length)
        return generate_candidates(axes, workload.cluster, workload.shape, device_kind=device_kind)
    return read_candidates(
        flags.configs, workload.cluster, workload.shape, seq_length=(flags.seq_length or [seq_length])[0],
        micro_batch_size=(flags.micro_batch_size or [None])[0],
        gradient_accumulation_steps=flags.gradient_accumulation_steps, device_kind=device_kind)


def _one_of_each(found: CandidateSet) -> list[Candidate]:
    """Of layouts that differ in the micro-batch only, the smallest."""
    return [group[0] for group in group_micro_batches(found.candidates)]


def _search_lines(flags: argparse.Namespace, workload: Workload, found: CandidateSet) -> list[str]:
    """What was held fixed."""
    layout, cluster = found.candidates[0].layout, workload.cluster
    fixed = {"max_model": f"the proportions of {workload.name}", "max_seq": workload.name,
             "max_micro_batch": workload.name}[flags.find]
    if workload.shape is None:
        return ["", f"model states alone, on {cluster.describe()}"]
    fixed += "" if flags.find == "max_seq" else f"; sequences of {layout.seq_length}"
    fixed += "" if flags.find == "max_micro_batch" else f"; micro-batch {layout.micro_batch_size}"
    return ["", f"{fixed}; on {cluster.describe()}; to fit: the device less {cluster.margin:.0%}, host memory less 10%"]


def make_report(flags: argparse.Namespace, workload: Workload, found: CandidateSet) -> Report:
    """All rows, in the order in which they are shown, and what follows from them."""
    rows = compare(found.candidates, workload, all_micro_batches=flags.all_micro_batches)
    best = recommend(rows) if workload.shape else None
    if workload.shape is not None:
        rows.sort(key=_order)
    cost = None
    if best is not None and best.time is not None:
        cost = run_cost(best.candidate.layout, num_parameters=workload.num_parameters,
                        flops_per_token=workload.flops_per_token(best.candidate.layout.seq_length),
                        peak_flops=best.time.peak_flops, mfu=flags.mfu or best.time.mfu, nodes=workload.cluster.nodes,
                        tokens=flags.tokens, storage_rate=flags.storage_gbps * GB)
    report = Report(workload, rows, best, cost, found.impossible, [])
    report.lines.extend(_lines(report, flags))
    return report


def _order(row: ComparisonRow) -> tuple[bool, bool, float]:
    """Those that fit and run first, by time; those that do not fit last, by what they need."""
    size = row.estimate.peak.total(location="device")
    return not row.fits, bool(row.rejection), row.time.total_seconds if row.fits and row.time else size


def _unit(flags: argparse.Namespace, cluster: Cluster) -> str:
    return flags.unit or ("GB" if flags.num_parameters else "GiB" if cluster.gpu.memory_bytes >= GIB else "MiB")


def _lines(report: Report, flags: argparse.Namespace) -> list[str]:
    """What is said below the table."""
    workload, cluster, unit = report.workload, report.workload.cluster, _unit(flags, report.workload.cluster)
    count = f" ({workload.num_parameters:,} parameters)" if workload.shape else ""
    lines = ["", f"{workload.name}{count} on {cluster.describe()}",
             f"{unit} of one rank at its peak, host and NVMe of a node; to fit: the device less {cluster.margin:.0%}, "
             "host memory less 10%"]
    if workload.shape is None:
        lines.append(paper_line(report))
    else:
        lines.append(f"step times: {workload.kernel_efficiency:.0%} of the peak rate while computing, "
                     f"{LINK_EFFICIENCY:.0%} of {cluster.gpu.peer_rate / GB:g} GB/s in a node, "
                     f"{cluster.network_rate / GB:g} between nodes (a GPU), {cluster.gpu.pcie_rate / GB:g} PCIe, "
                     f"{cluster.nvme_rate / GB:g} NVMe (a node)")
        lines += _advice(report, flags)
    lines += _differences(report)
    lines += [f"no layout: {why}" + f" ({number} combinations)" * (number > 1)
              for why, number in report.impossible.items()] if flags.configs or len(report.impossible) < 3 else \
        ["no layouts: " + "; ".join(f"{why} ({number})" for why, number in report.impossible.items())]
    lines += sorted({f"{row.candidate.name}: {note}" for row in report.rows for note in row.candidate.layout.notes})
    return lines


def _differences(report: Report) -> list[str]:
    """Where DeepSpeed's own estimators count in another way, a line for each way."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in report.rows:
        if row.deepspeed is not None:
            groups.setdefault(row.deepspeed.differs, []).append(row.candidate.name)
    head = ["DeepSpeed: its own estimators' device / node's host; ours differ, as theirs have"] * bool(groups)
    return head + [f"  {min(names, key=len)}{' ...' * (len(names) > 1)}: {'; '.join(said)}"
                   for said, names in groups.items()]


def _advice(report: Report, flags: argparse.Namespace) -> list[str]:
    """The recommendation and what it costs, or what is nearest to fitting."""
    best, cluster = report.recommended, report.workload.cluster
    if best is None:
        nearest = min(report.rows, key=lambda row: row.estimate.peak.total(location="device"))
        return [f"recommended: none fits and is run here; the smallest on the device is {nearest.candidate.name} "
                f"({nearest.shortage or nearest.rejection})"]
    assert best.time is not None
    assert report.cost is not None
    layout, unit = best.candidate.layout, _unit(flags, cluster)
    return [f"recommended: {best.candidate.name}, micro-batch {layout.micro_batch_size} x "
            f"{layout.gradient_accumulation_steps} accumulation: {in_unit(best.estimate.device_bytes, unit)} of "
            f"{in_unit(cluster.gpu.memory_bytes, unit)} {unit}, {best.time.total_seconds:.3g} s for a step of "
            f"{layout.tokens_per_step:,} tokens, MFU {best.time.mfu:.0%}",
            *cost_lines(report.cost, cluster.nodes, flags.storage_gbps * GB)]


def paper_line(report: Report) -> str:
    """The ZeRO paper's row (arXiv 1910.02054, figure 1 and table 1): GB of states of a rank, three digits."""
    sizes = {row.candidate.layout.zero_stage: row.estimate.steady.states("device") for row in reversed(report.rows)
             if row.candidate.layout.offload_optimizer == "none"}
    return "model states of a rank, ZeRO-" + "/".join(map(str, sorted(sizes))) + ": " + \
        " / ".join(three_digits(sizes[stage] / GB) for stage in sorted(sizes)) + " GB"


def three_digits(number: float) -> str:
    """As the ZeRO paper prints sizes: 120, 31.4, 1.9."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _emit(path: str | None, text: Callable[[], str]) -> bool:
    """Write to a file, or to stdout for "-". Returns whether it went to stdout."""
    if path is None:
        return False
    content = text()
    if path == "-":
        sys.stdout.write(content)
        return True
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(path, found=error.strerror or str(error), expected="a file that can be written to") from None
    return False


def _write(path: str, report: Report) -> None:
    if report.recommended is None:
        raise ConfigError("--write", found="no layout that fits and that this project runs", expected="one",
                          remedy="more GPUs, larger ones, or a smaller model")
    write_config(path, report.recommended.candidate.config)
    print(f"wrote {path}: {report.recommended.candidate.name}", file=sys.stderr)
