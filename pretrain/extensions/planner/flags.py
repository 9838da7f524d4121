"""The flags of `ds-pretrain compare`, with those of the planner."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.cli import Parser, number, path_text, whole_number
from pretrain.errors import ConfigError
from pretrain.extensions.planner.largest_fit import FIND_TARGETS
from pretrain.extensions.planner.plot import check_plot
from pretrain.memory.compare.compare_flags import OUTPUT_FLAGS, add_model_and_layouts, reject, validate_flags
from pretrain.memory.footprint import GB, STORAGE_RATE
from pretrain.paths import check_file

MODES = ("estimate", "simulate", "measure")
_OUTPUT_FLAGS: dict[str, dict[str, Any]] = {
    "--all": {"action": "store_true", "dest": "all_layouts",
              "help": "show a table of all layouts, with the reasons of those that are too large or impossible, "
                      "instead of the ten best distinct choices"},
    **{f"--{name}": {"nargs": "?", "const": "-", "type": path_text, "metavar": "FILE",
                     "help": f"{about} (without FILE: to stdout, instead of the table)"}
       for name, about in (("json", "write all results as JSON"), ("csv", "write the table as CSV"))},
    "--plot": {"type": path_text, "metavar": "FILE", "help": "write a bar chart of the memory, as .html"}}


def parse_flags(words: list[str]) -> argparse.Namespace:
    """Parse and validate the command line: an optional mode, then the flags. Raises ConfigError."""
    mode = words[0] if words and words[0] in MODES else MODES[0]
    flags = _parser().parse_args(words[1:] if words and words[0] in MODES else words)
    flags.mode = mode
    validate_flags(flags, model_is_known=bool(flags.calibrate))
    _validate_flags(flags)
    if mode != "estimate":  # each layout takes seconds: no other parallel degrees unless they are given
        for name in ("tensor_parallel", "sequence_parallel", "expert_parallel"):
            setattr(flags, name, getattr(flags, name) or [1])
    return flags


def _parser() -> Parser:
    """One parser for all modes; `_validate_flags` rejects flags that have no effect in a mode."""
    usage = f"ds-pretrain compare [{'|'.join(MODES)}]\n           --model NAME --world_size N [flags]"
    parser = Parser(usage=usage, formatter_class=argparse.RawDescriptionHelpFormatter, description=(
        "Compare ways to run a model on given GPUs: memory, step time, whether it fits.\n"
        "estimate: (the default) formulas, for any number of ranks, in a second or two\n"
        "simulate: the real DeepSpeed engine of one rank of each layout, on tensors without data\n"
        "measure:  real runs of the --configs on this machine, for a few steps"))
    add_model_and_layouts(parser)
    group = parser.add_argument_group("the comparison")
    group.add_argument("--find", choices=FIND_TARGETS,
                       help="find the largest model, sequence or micro-batch that fits each layout")
    group.add_argument("--tokens", type=number(1, 1e20),
                       help="tokens of the run, for its cost (default: 20 per parameter)")
    group.add_argument("--mfu", type=number(1e-4, 1),
                       help="MFU (fraction of the peak rate) for the cost, instead of the predicted MFU")
    group.add_argument("--kernel_efficiency", type=number(1e-4, 1),
                       help="fraction of the peak rate that large matrix products reach (default: the GPU's)")
    group.add_argument("--calibrate", nargs="+", type=path_text, metavar="RUN",
                       help="fit the step times to measured runs (their run folders); also on CPUs")
    group.add_argument("--storage_gbps", type=number(1e-3, 1e9), default=STORAGE_RATE / GB,
                       help=f"rate at which a node writes checkpoints, GB/s (default: {STORAGE_RATE / GB:g})")
    group.add_argument("--steps", type=whole_number(2, 10**4), help="measure: timed steps of each run (default: 4)")
    group.add_argument("--nvme_path", type=path_text,
                       help="measure: folder on a local disk, for JSONs whose nvme_path is \"auto\"")
    group = parser.add_argument_group("output")
    options = {**OUTPUT_FLAGS, **_OUTPUT_FLAGS}
    for flag in ("--unit", "--all", "--all_micro_batches", "--json", "--csv", "--plot", "--write"):
        group.add_argument(flag, *(["--all_layouts"] if flag == "--all" else []), **options[flag])
    return parser


def _validate_flags(flags: argparse.Namespace) -> None:
    """Raise ConfigError for flags of the planner that exclude others, or that would have no effect."""
    if flags.calibrate and flags.kernel_efficiency is not None:
        raise ConfigError("--kernel_efficiency", problem="--calibrate fits this value", remedy="Leave one of them out")
    if flags.mode == "measure" and not flags.configs:
        raise ConfigError("measure", problem="--configs is missing, which names the DeepSpeed JSONs to run",
                          remedy="example: --configs zero2_bf16 zero3_bf16")
    if flags.mode != "estimate":
        reject(flags, ["find", "num_parameters", "plot", "write", "csv", "calibrate"], f"in the mode {flags.mode}")
    if flags.mode != "measure":
        reject(flags, ["steps", "nvme_path"], f"in the mode {flags.mode}")
    if flags.find:
        reject(flags, ["plot", "write", "csv", "calibrate"], "with --find")
    if flags.find == "max_seq":
        reject(flags, ["seq_length"], "with --find max_seq")
    if flags.find == "max_micro_batch":
        reject(flags, ["micro_batch_size", "global_batch_size"], "with --find max_micro_batch")
    if flags.plot is not None:
        check_plot(flags.plot)
    for name in ("json", "csv", "plot"):
        if getattr(flags, name) not in (None, "-"):
            check_file(Path(getattr(flags, name)), f"--{name}")
    if flags.num_parameters is not None:
        reject(flags, ["calibrate"], "with --num_parameters")
