"""Main function of `ds-pretrain compare`: compares the memory of layouts."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain.config.layout import Layout
from pretrain.config.model_of_run import with_dropout
from pretrain.errors import ConfigError
from pretrain.memory.compare.candidates import CandidateSet, generate_candidates, read_candidates
from pretrain.memory.compare.compare import ComparisonRow, Workload, compare, display_order, recommend, step_estimates
from pretrain.memory.compare.compare_flags import DEFAULT_SEQ_LENGTH, axes_of, cluster_of, parse_flags
from pretrain.memory.compare.table import ComparisonReport, print_report
from pretrain.memory.footprint import GB, GIB
from pretrain.memory.hardware import Cluster
from pretrain.model.config import load_model_config


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Raises ConfigError."""
    flags = parse_flags(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which some models need, would detect one and warn
    workload = workload_of(flags, cluster_of(flags, flags.gpu))
    report = make_report(flags, workload, candidates_of(flags, workload, workload.cluster.gpu.kind))
    print_report(report, unit_of(flags, workload.cluster))
    if flags.write:
        write_recommended(flags.write, report.recommended)


def workload_of(flags: argparse.Namespace, cluster: Cluster) -> Workload:
    """Return the model that the flags describe, on a cluster."""
    if flags.num_parameters is not None:
        return Workload(cluster, flags.num_parameters, name=f"{flags.num_parameters / 1e9:,.4g} B parameters")
    model = with_dropout(load_model_config(flags.model, flags.model_overrides), flags)
    return Workload(cluster, model.num_parameters(), model, flags.model, step_estimates(cluster))


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


def make_report(flags: argparse.Namespace, workload: Workload, candidates: CandidateSet) -> ComparisonReport:
    """Compare the layouts. Return the rows in display order, with the recommended one."""
    rows = compare(candidates.candidates, workload, all_micro_batches=flags.all_micro_batches)
    best = recommend(rows) if workload.model else None
    if workload.model is not None:
        rows = display_order(rows, best)
    report = ComparisonReport(workload, rows, best, candidates.impossible, [("", title_of(workload))], [])
    if best is not None:
        unit = unit_of(flags, workload.cluster)
        report.heading.append(("use", f"{best.describe(workload.cluster, unit)}{flags_of(best)}"))
    elif workload.model is not None:
        report.heading.append(("use", no_layout(rows)))
    report.lines.extend([*lines_on_columns(report, flags), *lines_on_layouts(report, flags)])
    return report


def title_of(workload: Workload) -> str:
    """Name the model and the machines."""
    count = f" ({workload.num_parameters:,} parameters)" if workload.model else ""
    return f"{workload.name}{count} on {workload.cluster.describe()}"


def no_layout(rows: list[ComparisonRow]) -> str:
    """Say that no layout can be used, and name the one that needs the least memory."""
    nearest = min(rows, key=lambda row: row.estimate.device_bytes)
    return "no layout: none both fits and runs; the smallest on the device is " \
           f"{nearest.candidate.name} ({nearest.shortage or nearest.candidate.rejection})"


def flags_of(row: ComparisonRow) -> str:
    """Return the flags of train.py that the layout needs in addition to its JSON."""
    part = row.candidate.layout.recompute
    return "" if part == "none" else f"; train it with --recompute {part}"


def unit_of(flags: argparse.Namespace, cluster: Cluster) -> str:
    """Return the unit of a table: the given one, or one that suits the sizes."""
    return flags.unit or ("GB" if flags.num_parameters else "GiB" if cluster.gpu.memory_bytes >= GIB else "MiB")


def lines_on_columns(report: ComparisonReport, flags: argparse.Namespace, estimates: Sequence[str] = ()) -> list[str]:
    """Explain the columns of the table.

    Args:
        estimates: lines about the estimates of a step.
    """
    workload, unit = report.workload, unit_of(flags, report.workload.cluster)
    lines = [f"{unit} of one rank at its peak, host and NVMe of a node; a layout fits into the device less "
             f"{workload.cluster.margin:.0%} and the host memory less 10%"]
    if workload.model is None:
        return [*lines, paper_line(report)]
    lines += estimates
    if flags.configs:
        lines.append("activations are those of this program's models, kernels and recomputation, also for a JSON "
                     "of another program, which may keep more or fewer")
    if flags.network_gbps is not None:  # networks are sold in Gbit/s
        lines.append(f"--network_gbps {flags.network_gbps:g}: {flags.network_gbps:g} GB/s for each GPU, which is "
                     f"{flags.network_gbps * 8:g} Gbit/s; a network of {flags.network_gbps:g} Gbit/s is "
                     f"--network_gbps {flags.network_gbps / 8:g}")
    return lines


def lines_on_layouts(report: ComparisonReport, flags: argparse.Namespace) -> list[str]:
    """Say why combinations are impossible, and list the notes of the layouts."""
    impossible = report.impossible
    if flags.configs or len(impossible) < 3:
        lines = [f"impossible: {reason} ({number} combinations)" if number > 1 else f"impossible: {reason}"
                 for reason, number in impossible.items()]
    else:
        lines = ["impossible: " + "; ".join(f"{reason} ({number})" for reason, number in impossible.items())]
    return [*lines, *sorted({f"{row.candidate.name}: {note}" for row in report.rows
                             for note in row.candidate.layout.notes})]


def paper_line(report: ComparisonReport) -> str:
    """Model states of a rank in GB, as in the ZeRO paper (arXiv 1910.02054, figure 1 and table 1)."""
    sizes = {row.candidate.layout.zero_stage: row.estimate.steady.states("device") / GB
             for row in reversed(report.rows) if row.candidate.layout.offload_optimizer == "none"}
    return "model states of a rank, ZeRO-" + "/".join(map(str, sorted(sizes))) + ": " + \
        " / ".join(f"{size:.0f}" if size >= 100 else f"{size:.1f}" for _, size in sorted(sizes.items())) + " GB"


def write_output(path: str, text: str) -> None:
    """Write a text to a file, or to stdout if the path is "-". Raises ConfigError."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(path, problem=f"cannot write the file: {error.strerror or error}") from None


def write_recommended(path: str, best: ComparisonRow | None) -> None:
    """Write the recommended layout as a DeepSpeed JSON. Raises ConfigError if there is none."""
    if best is None:
        raise ConfigError("--write", problem="there is no layout that fits and that this project can run",
                          remedy="Use more GPUs, larger GPUs, or a smaller model")
    write_output(path, json.dumps(best.candidate.config, indent=2) + "\n")
    print(f"wrote {path}: {best.candidate.name}{flags_of(best)}", file=sys.stderr)
