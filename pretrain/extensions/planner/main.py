"""Main function of `ds-pretrain compare` with step times, cost, and real or simulated engines."""

import argparse
import os
import sys

from pretrain.distributed.device import detect_device
from pretrain.errors import FINISHED, NOTHING_FITS, format_number
from pretrain.extensions.planner.choices import distinct_choices
from pretrain.extensions.planner.cost import run_cost
from pretrain.extensions.planner.estimates import time_of
from pretrain.extensions.planner.flags import parse_flags
from pretrain.extensions.planner.largest_fit import find_largest
from pretrain.extensions.planner.output import (
    PlannerReport,
    deepspeed_of,
    largest_json,
    print_choices,
    print_largest,
    recommendation_lines,
    report_csv,
    report_json,
    time_cells,
)
from pretrain.extensions.planner.plot import html
from pretrain.extensions.planner.search import PlannerWorkload, candidates_of, workload_of
from pretrain.extensions.planner.step_time.calibrate import calibration_lines
from pretrain.extensions.planner.step_time.time_parameters import TimeParameters
from pretrain.memory.compare.candidates import Candidate, CandidateSet, group_micro_batches
from pretrain.memory.compare.compare import Workload, compare, display_order, recommend
from pretrain.memory.compare.compare_zero import (
    impossible_lines,
    print_report,
    title_of,
    unit_line,
    unit_of,
    write_output,
    write_recommended,
)
from pretrain.memory.footprint import GB
from pretrain.memory.hardware import Cluster
from pretrain.model.flops import flops_per_token


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit code. Raises ConfigError."""
    flags = parse_flags(sys.argv[1:] if argv is None else argv)
    if flags.mode == "estimate":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which some models need, would detect one and warn
    workload = workload_of(flags)
    kind = _device_kind(flags.mode) if workload.cluster.gpu.kind == "cuda" else "cpu"
    candidates = candidates_of(flags, workload, kind)
    if flags.mode != "estimate":
        # imports numpy, which the estimate does not need
        from pretrain.extensions.planner.estimate_check import check_estimates, checks_json, print_checks

        checks = check_estimates(_smallest_micro_batches(candidates), workload, flags)
        if flags.json:
            write_output(flags.json, checks_json(checks))
        if flags.json != "-":
            print_checks(checks, flags.unit or "MiB")
        return FINISHED
    if flags.find:
        largest = find_largest(flags.find, _smallest_micro_batches(candidates), workload)
        if flags.json:
            write_output(flags.json, largest_json(largest))
        if flags.json != "-":
            print_largest(largest, _constraint_lines(flags, workload, candidates))
        return FINISHED
    report = make_report(flags, workload, candidates)
    for path, text in ((flags.json, report_json), (flags.csv, report_csv)):
        if path:
            write_output(path, text(report))
    if "-" not in (flags.json, flags.csv):
        unit = _unit(flags, workload.cluster)
        if _shows_all(flags):
            print_report(report, unit, columns=lambda row: time_cells(row, workload, unit))
        else:
            print_choices(report, unit)
    if flags.plot:
        write_output(flags.plot, html(report))
    if flags.write:
        write_recommended(flags.write, report.recommended)
    return NOTHING_FITS if workload.model is not None and report.recommended is None else FINISHED


def _device_kind(mode: str) -> str:
    """Return the kind of device whose kernels determine the activations. Simulations use CPU kernels."""
    return {"estimate": "cuda", "simulate": "cpu"}.get(mode) or detect_device().kind


def _smallest_micro_batches(candidates: CandidateSet) -> list[Candidate]:
    """Return the layouts; of those that differ only in the micro-batch size, only the one with the smallest size."""
    return [group[0] for group in group_micro_batches(candidates.candidates)]


def _constraint_lines(flags: argparse.Namespace, workload: Workload, candidates: CandidateSet) -> list[str]:
    """Describe the model, sizes and cluster that --find keeps fixed."""
    layout, cluster = candidates.candidates[0].layout, workload.cluster
    if workload.model is None:
        return ["", f"model states only, on {cluster.describe()}"]
    fixed = [f"the proportions of {workload.name}" if flags.find == "max_model" else workload.name]
    if flags.find != "max_seq":
        fixed.append(f"sequences of {layout.seq_length}")
    if flags.find != "max_micro_batch":
        fixed.append(f"micro-batch {layout.micro_batch_size}")
    return ["", f"{'; '.join(fixed)}; on {cluster.describe()}; a layout fits into the device less "
            f"{cluster.margin:.0%} and the host memory less 10%"]


def make_report(flags: argparse.Namespace, workload: PlannerWorkload, candidates: CandidateSet) -> PlannerReport:
    """Compare the layouts. Return the rows in display order, with recommendation and cost."""
    rows = compare(candidates.candidates, workload, all_micro_batches=flags.all_micro_batches)
    best, cost, choices, heading = None, None, [], [("", title_of(workload))]
    if workload.model is not None:
        best = recommend(rows)
        rows = display_order(rows, best)
        if best is not None and (time := time_of(best)) is not None:
            layout = best.candidate.layout
            cost = run_cost(layout, num_parameters=workload.num_parameters,
                            flops_per_token=flops_per_token(workload.model, layout.seq_length),
                            peak_flops=time.peak_flops, mfu=flags.mfu or time.mfu, nodes=workload.cluster.nodes,
                            tokens=flags.tokens, storage_rate=flags.storage_gbps * GB)
        choices = distinct_choices(rows, best, workload)
        heading += recommendation_lines(rows, best, cost, workload, _unit(flags, workload.cluster),
                                        flags.storage_gbps * GB)
    report = PlannerReport(workload, rows, best, candidates.impossible, heading, [], choices, cost,
                           workload.time_parameters, workload.calibration)
    report.lines.extend(_lines_below_table(report, flags))
    return report


def _unit(flags: argparse.Namespace, cluster: Cluster) -> str:
    return flags.unit or ("GB" if flags.num_parameters else unit_of(cluster))


def _shows_all(flags: argparse.Namespace) -> bool:
    """Return whether the output is the table of all layouts instead of the distinct choices."""
    return bool(flags.all_layouts or flags.all_micro_batches or flags.configs or flags.num_parameters)


def _lines_below_table(report: PlannerReport, flags: argparse.Namespace) -> list[str]:
    """Explain the table."""
    cluster = report.workload.cluster
    lines = [unit_line(cluster, _unit(flags, cluster))]
    if report.workload.model is None:
        lines.append(paper_line(report))
    else:
        lines += calibration_lines(report.calibration) if report.calibration else []
        lines += _other_precisions(report)
        lines.append(step_time_line(cluster, report.time_parameters))
        if flags.configs:
            lines.append("activations are those of this program's models, kernels and recomputation, also for a JSON "
                         "of another program, which may keep more or fewer")
        if flags.network_gbps is not None:  # networks are sold in Gbit/s
            lines.append(f"--network_gbps {flags.network_gbps:g}: {flags.network_gbps:g} GB/s for each GPU, which is "
                         f"{flags.network_gbps * 8:g} Gbit/s; a network of {flags.network_gbps:g} Gbit/s is "
                         f"--network_gbps {flags.network_gbps / 8:g}")
    if not _shows_all(flags) and len(report.choices) < len(report.rows):
        return lines
    lines += _estimator_differences(report)
    lines += impossible_lines(report.impossible, one_line_each=bool(flags.configs))
    return [*lines, *sorted({f"{row.candidate.name}: {note}" for row in report.rows
                             for note in row.candidate.layout.notes})]


def paper_line(report: PlannerReport) -> str:
    """Model states of a rank in GB, as in the ZeRO paper (arXiv 1910.02054, figure 1 and table 1)."""
    sizes = {row.candidate.layout.zero_stage: row.estimate.steady.states("device") / GB
             for row in reversed(report.rows) if row.candidate.layout.offload_optimizer == "none"}
    return "model states of a rank, ZeRO-" + "/".join(map(str, sorted(sizes))) + ": " + \
        " / ".join(f"{size:.0f}" if size >= 100 else f"{size:.1f}" for _, size in sorted(sizes.items())) + " GB"


def _estimator_differences(report: PlannerReport) -> list[str]:
    """Explain how the estimates of DeepSpeed's own functions differ from ours, in one line per group of layouts."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in report.rows:
        if (deepspeed := deepspeed_of(row, report.workload)) is not None:
            groups.setdefault(deepspeed.differs, []).append(row.candidate.name)
    if not groups:
        return []
    lines = ["column DeepSpeed: device / host of a node, as DeepSpeed's own functions estimate them. How they differ:"]
    for differs, names in groups.items():
        others = " ..." if len(names) > 1 else ""
        lines.append(f"  {min(names, key=len)}{others}: {'; '.join(differs)}")
    return lines


def _other_precisions(report: PlannerReport) -> list[str]:
    """Warn about layouts in another precision than the measured runs."""
    if report.calibration is None:
        return []
    measured = {run.layout.precision for run in report.calibration.runs}
    other = sorted({row.candidate.layout.precision for row in report.rows} - measured)
    return [f"  the runs did not compute in {', '.join(other)}: expect larger errors, or select another --precision"
            ] if other else []


def step_time_line(cluster: Cluster, rates: TimeParameters) -> str:
    """Describe the rates that the step times follow from."""
    gpu = cluster.gpu
    launch = f"{format_number(rates.launch_seconds * 1e6)} us to launch a kernel"
    products = gpu.product_efficiency * rates.compute_speed
    link = f"{rates.link_efficiency:.0%} of {gpu.peer_rate / GB:g} GB/s"
    if gpu.kind == "cpu":
        return f"step times: large products reach {products * gpu.peak_tflops:.3g} TFLOP/s on a rank, which MFU " \
               f"takes as the peak rate; {link} between ranks; {launch}"
    return f"step times: large products reach {products:.0%} of the peak rate; {link} in a node, " \
           f"{cluster.network_rate / GB:g} between nodes (a GPU), {gpu.pcie_rate / GB:g} PCIe, " \
           f"{cluster.nvme_rate / GB:g} NVMe (a node); {launch}"
