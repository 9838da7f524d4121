"""Main function of `ds-pretrain compare`: compares layouts, and prints or writes the result."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pretrain.config.layout import Layout
from pretrain.config.model_of_run import with_dropout
from pretrain.distributed.device import detect_device
from pretrain.errors import ConfigError, format_number
from pretrain.memory.compare.candidates import (
    Candidate,
    CandidateSet,
    generate_candidates,
    group_micro_batches,
    read_candidates,
)
from pretrain.memory.compare.choices import distinct_choices
from pretrain.memory.compare.compare import (
    ComparisonRow,
    Workload,
    compare,
    recommend,
    run_cost,
    step_seconds,
)
from pretrain.memory.compare.compare_zero_flags import DEFAULT_SEQ_LENGTH, axes_of, cluster_of, parse_flags
from pretrain.memory.compare.largest_fit import find_largest
from pretrain.memory.compare.plot import html
from pretrain.memory.compare.table import (
    ComparisonReport,
    largest_json,
    print_choices,
    print_largest,
    print_report,
    report_csv,
    report_json,
)
from pretrain.memory.compare.verdict import Lines, flags_of, verdict_lines
from pretrain.memory.footprint import GB, GIB
from pretrain.memory.hardware import DEFAULT_GPU, Cluster
from pretrain.memory.step_time.calibrate import Calibration, calibrate, calibration_lines, on_cpus
from pretrain.memory.step_time.time_parameters import DEFAULT_PARAMETERS
from pretrain.model.config import load_model_config
from pretrain.model.flops import flops_per_token


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Raises ConfigError."""
    flags = parse_flags(sys.argv[1:] if argv is None else argv)
    if flags.mode == "estimate":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which some models need, would detect one and warn
    workload = workload_of(flags)
    kind = _device_kind(flags.mode) if workload.cluster.gpu.kind == "cuda" else "cpu"
    candidates = candidates_of(flags, workload, kind)
    if flags.mode != "estimate":
        # imports numpy, which the estimate does not need
        from pretrain.memory.compare.estimate_check import check_estimates, checks_json, print_checks, print_progress

        checks = check_estimates(_smallest_micro_batches(candidates), workload, flags, print_progress)
        if not _write_output(flags.json, lambda: checks_json(checks)):
            print_checks(checks, flags.unit or "MiB")
        return
    if flags.find:
        largest = find_largest(flags.find, _smallest_micro_batches(candidates), workload)
        if not _write_output(flags.json, lambda: largest_json(largest)):
            print_largest(largest, _constraint_lines(flags, workload, candidates))
        return
    report = make_report(flags, workload, candidates)
    json_printed = _write_output(flags.json, lambda: report_json(report))
    csv_printed = _write_output(flags.csv, lambda: report_csv(report))
    if not json_printed and not csv_printed:
        unit = _unit(flags, workload.cluster)
        if _shows_all(flags):
            print_report(report, unit)
        else:
            print_choices(report, unit)
    if flags.plot:
        _write_output(flags.plot, lambda: html(report))
    if flags.write:
        _write_recommended(flags.write, report)


def workload_of(flags: argparse.Namespace) -> Workload:
    """Return the model and the machines that the flags describe, or that the run in --calibrate used."""
    calibration = calibrate(flags.calibrate, flags.gpu) if flags.calibrate else None
    cluster = cluster_of(flags, flags.gpu) if calibration is None else _calibrated_cluster(flags, calibration)
    if flags.kernel_efficiency is not None:
        cluster = replace(cluster, gpu=replace(cluster.gpu, product_efficiency=flags.kernel_efficiency))
    if flags.num_parameters is not None:
        return Workload(cluster, flags.num_parameters, name=f"{flags.num_parameters / 1e9:,.4g} B parameters")
    if flags.model is not None:
        model, name = with_dropout(load_model_config(flags.model, flags.model_overrides), flags), flags.model
    else:
        assert calibration is not None
        model, name = calibration.runs[0].model, f"the model of {calibration.runs[0].path}"
    parameters = calibration.parameters if calibration else DEFAULT_PARAMETERS
    return Workload(cluster, model.num_parameters(), model, name, parameters, calibration)


def _calibrated_cluster(flags: argparse.Namespace, calibration: Calibration) -> Cluster:
    """Return machines like in the measured runs. Without flags, the number of ranks is the first run's."""
    run = calibration.runs[0]
    if flags.world_size is None and flags.nodes is None and flags.gpus_per_node is None:
        flags = argparse.Namespace(**{**vars(flags), "world_size": run.layout.world_size})
    cluster = cluster_of(flags, calibration.gpu.name if calibration.gpu else DEFAULT_GPU)
    return cluster if calibration.gpu else on_cpus(cluster, run)


def _device_kind(mode: str) -> str:
    """Return the kind of device whose kernels determine the activations. Simulations use CPU kernels."""
    return {"estimate": "cuda", "simulate": "cpu"}.get(mode) or detect_device().kind


def candidates_of(flags: argparse.Namespace, workload: Workload, device_kind: str) -> CandidateSet:
    """Return the layouts that the flags describe."""
    positions = workload.model.max_positions if workload.model else DEFAULT_SEQ_LENGTH
    seq_length = min(DEFAULT_SEQ_LENGTH, positions)
    documents = bool(flags.document_attention)
    if not flags.configs:
        return generate_candidates(axes_of(flags, seq_length), workload.cluster, workload.model,
                                   device_kind=device_kind, document_attention=documents)
    assert workload.model is not None
    given = Layout(seq_length=(flags.seq_length or [seq_length])[0], document_attention=documents,
                   device_kind=device_kind)
    return read_candidates(flags.configs, given, workload.cluster, workload.model,
                           micro_batch_size=(flags.micro_batch_size or [None])[0],
                           gradient_accumulation_steps=flags.gradient_accumulation_steps)


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


def make_report(flags: argparse.Namespace, workload: Workload, candidates: CandidateSet) -> ComparisonReport:
    """Compare the layouts. Return the rows in display order, with recommendation and cost."""
    rows = compare(candidates.candidates, workload, all_micro_batches=flags.all_micro_batches)
    best = recommend(rows) if workload.model else None
    if workload.model is not None:
        rows = display_order(rows, best)
    cost = None
    if best is not None and best.time is not None and workload.model is not None:
        layout = best.candidate.layout
        cost = run_cost(layout, num_parameters=workload.num_parameters,
                        flops_per_token=flops_per_token(workload.model, layout.seq_length),
                        peak_flops=best.time.peak_flops, mfu=flags.mfu or best.time.mfu, nodes=workload.cluster.nodes,
                        tokens=flags.tokens, storage_rate=flags.storage_gbps * GB)
    choices = distinct_choices(rows, best, workload) if workload.model else []
    report = ComparisonReport(workload, rows, choices, best, cost, candidates.impossible, [], [])
    report.heading.extend(_lines_above_table(report, flags))
    report.lines.extend(_lines_below_table(report, flags))
    return report


def display_order(rows: list[ComparisonRow], best: ComparisonRow | None) -> list[ComparisonRow]:
    """Sort rows: the recommended one, the others that fit and that train.py accepts, then those that train.py rejects.

    Each group is sorted by step time. Rows that do not fit come last, sorted by device memory.
    """
    accepted = [row for row in rows if row.recommendable and row is not best]
    rejected = [row for row in rows if row.fits and row.candidate.rejection]
    too_large = [row for row in rows if not row.fits]
    return [*([best] if best else []), *sorted(accepted, key=step_seconds), *sorted(rejected, key=step_seconds),
            *sorted(too_large, key=lambda row: (bool(row.candidate.rejection), row.estimate.device_bytes))]


def _unit(flags: argparse.Namespace, cluster: Cluster) -> str:
    return flags.unit or ("GB" if flags.num_parameters else "GiB" if cluster.gpu.memory_bytes >= GIB else "MiB")


def _shows_all(flags: argparse.Namespace) -> bool:
    """Return whether the output is the table of all layouts instead of the distinct choices."""
    return bool(flags.all_layouts or flags.all_micro_batches or flags.configs or flags.num_parameters)


def _lines_above_table(report: ComparisonReport, flags: argparse.Namespace) -> Lines:
    """Name the model and the machines, and recommend a layout."""
    workload = report.workload
    count = f" ({workload.num_parameters:,} parameters)" if workload.model else ""
    title = "", f"{workload.name}{count} on {workload.cluster.describe()}"
    if workload.model is None:
        return [title]
    return [title, *verdict_lines(report, _unit(flags, workload.cluster), flags.storage_gbps * GB)]


def _lines_below_table(report: ComparisonReport, flags: argparse.Namespace) -> list[str]:
    """Explain the table."""
    workload, cluster, unit = report.workload, report.workload.cluster, _unit(flags, report.workload.cluster)
    lines = [f"{unit} of one rank at its peak, host and NVMe of a node; a layout fits into the device less "
             f"{cluster.margin:.0%} and the host memory less 10%"]
    if workload.model is None:
        lines.append(paper_line(report))
    else:
        lines += calibration_lines(workload.calibration) if workload.calibration else []
        lines += _other_precisions(report)
        lines.append(step_time_line(workload))
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
    lines += _impossible_lines(report.impossible, one_line_each=bool(flags.configs) or len(report.impossible) < 3)
    lines += sorted({f"{row.candidate.name}: {note}" for row in report.rows for note in row.candidate.layout.notes})
    return lines


def _impossible_lines(impossible: dict[str, int], *, one_line_each: bool) -> list[str]:
    """List the reasons why combinations are impossible. `impossible` maps each reason to a number of combinations."""
    if not one_line_each:
        return ["impossible: " + "; ".join(f"{reason} ({number})" for reason, number in impossible.items())]
    return [f"impossible: {reason} ({number} combinations)" if number > 1 else f"impossible: {reason}"
            for reason, number in impossible.items()]


def _estimator_differences(report: ComparisonReport) -> list[str]:
    """Explain how the estimates of DeepSpeed's own functions differ from ours, in one line per group of layouts."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in report.rows:
        if row.deepspeed is not None:
            groups.setdefault(row.deepspeed.differs, []).append(row.candidate.name)
    if not groups:
        return []
    lines = ["column DeepSpeed: device / host of a node, as DeepSpeed's own functions estimate them. How they differ:"]
    for differs, names in groups.items():
        others = " ..." if len(names) > 1 else ""
        lines.append(f"  {min(names, key=len)}{others}: {'; '.join(differs)}")
    return lines


def _other_precisions(report: ComparisonReport) -> list[str]:
    """Warn about layouts in another precision than the measured runs."""
    calibration = report.workload.calibration
    if calibration is None:
        return []
    measured = {run.layout.precision for run in calibration.runs}
    other = sorted({row.candidate.layout.precision for row in report.rows} - measured)
    return [f"  the runs did not compute in {', '.join(other)}: expect larger errors, or select another --precision"
            ] if other else []


def step_time_line(workload: Workload) -> str:
    """Describe the rates that the step times follow from."""
    cluster, rates, gpu = workload.cluster, workload.time_parameters, workload.cluster.gpu
    launch = f"{format_number(rates.launch_seconds * 1e6)} us to launch a kernel"
    products = gpu.product_efficiency * rates.compute_speed
    link = f"{rates.link_efficiency:.0%} of {gpu.peer_rate / GB:g} GB/s"
    if gpu.kind == "cpu":
        return f"step times: large products reach {products * gpu.peak_tflops:.3g} TFLOP/s on a rank, which MFU " \
               f"takes as the peak rate; {link} between ranks; {launch}"
    return f"step times: large products reach {products:.0%} of the peak rate; {link} in a node, " \
           f"{cluster.network_rate / GB:g} between nodes (a GPU), {gpu.pcie_rate / GB:g} PCIe, " \
           f"{cluster.nvme_rate / GB:g} NVMe (a node); {launch}"


def paper_line(report: ComparisonReport) -> str:
    """Model states of a rank in GB, as in the ZeRO paper (arXiv 1910.02054, figure 1 and table 1)."""
    sizes = {row.candidate.layout.zero_stage: row.estimate.steady.states("device") / GB
             for row in reversed(report.rows) if row.candidate.layout.offload_optimizer == "none"}
    return "model states of a rank, ZeRO-" + "/".join(map(str, sorted(sizes))) + ": " + \
        " / ".join(f"{size:.0f}" if size >= 100 else f"{size:.1f}" for _, size in sorted(sizes.items())) + " GB"


def _write_output(path: str | None, text: Callable[[], str]) -> bool:
    """Write a text to a file, or to stdout if the path is "-". Return whether it went to stdout."""
    if path is None:
        return False
    content = text()
    if path == "-":
        sys.stdout.write(content)
        return True
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(path, problem=f"cannot write the file: {error.strerror or error}") from None
    return False


def _write_recommended(path: str, report: ComparisonReport) -> None:
    """Write the recommended layout as a DeepSpeed JSON. Raises ConfigError if there is none."""
    best = report.recommended
    if best is None:
        raise ConfigError("--write", problem="there is no layout that fits and that this project can run",
                          remedy="Use more GPUs, larger GPUs, or a smaller model")
    _write_output(path, lambda: json.dumps(best.candidate.config, indent=2) + "\n")
    print(f"wrote {path}: {best.candidate.name}{flags_of(best)}", file=sys.stderr)
