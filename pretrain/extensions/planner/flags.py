"""The flags of `ds-pretrain compare`, and the layouts and machines that they describe."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.cli import Parser, number, path_text, text, whole_number
from pretrain.config.model_of_run import DROPOUTS
from pretrain.errors import ConfigError
from pretrain.extensions.planner.largest_fit import FIND_TARGETS
from pretrain.extensions.planner.plot import check_plot
from pretrain.memory.compare.candidates import SAMPLES_PER_RANK
from pretrain.memory.compare.combinations import OFFLOADS, PARALLEL_SIZES, RECOMPUTE_CHOICES, Axes
from pretrain.memory.compare.compare_zero import DEFAULT_SEQ_LENGTH, add_machines
from pretrain.memory.footprint import DEFAULT_MARGIN, GB, STORAGE_RATE, UNITS
from pretrain.memory.hardware import Cluster, make_cluster
from pretrain.paths import check_file

_MAX_SIZE = 10**8  # largest value of a flag that is a size or a count
MODES = ("estimate", "simulate", "measure")
# flag -> (field of Axes, type, choices, help)
_AXES: dict[str, tuple[str, type, tuple[Any, ...] | None, str]] = {
    "zero_stage": ("zero_stages", int, (0, 1, 2, 3), "ZeRO stages (default: all)"),
    "offload": ("offloads", str, tuple(OFFLOADS),
                "offloaded states and their destination (default: all choices)"),
    "pipeline_stages": ("pipeline_stages", int, None, "pipeline stages (default: powers of two up to 64)"),
    "tensor_parallel": ("tensor_parallel_sizes", int, None,
                        "ranks that share each matrix (default: 1, and up to the GPUs of a node for models that need "
                        "it)"),
    "sequence_parallel": ("sequence_parallel_sizes", int, None,
                          "ranks that share each sequence (default: 1, and more for sequences that need it)"),
    "expert_parallel": ("expert_parallel_sizes", int, None,
                        "ranks that share the experts (default: 1, and more for models with experts)"),
    "precision": ("precisions", str, ("bf16", "fp16", "fp32"),
                  "precisions (default: bf16, or fp16 if the GPU has no bf16)"),
    "grad_accum_dtype": ("grad_accum_dtypes", str, ("bf16", "fp16", "fp32"),
                         "dtypes of accumulated gradients (default: the precision)"),
    "activation_checkpoint_interval": (
        "activation_checkpoint_intervals", int, None,
        "number of layers that are recomputed together; 0: no recomputation (default: 0 1)"),
    "recompute": (
        "recomputes", str, RECOMPUTE_CHOICES,
        "parts of blocks that --recompute of train.py recomputes; offload: with an interval, the inputs of recomputed "
        "groups are in host memory (default: none attention mlp)"),
    "micro_batch_size": ("micro_batch_sizes", int, None, "samples per micro-batch (default: the best power of two)"),
    "seq_length": ("seq_lengths", int, None,
                   f"tokens per sample (default: {DEFAULT_SEQ_LENGTH}, or the model's positions if there are fewer)"),
}


def parse_flags(words: list[str]) -> argparse.Namespace:
    """Parse and validate the command line: an optional mode, then the flags. Raises ConfigError."""
    mode = words[0] if words and words[0] in MODES else MODES[0]
    flags = _parser().parse_args(words[1:] if words and words[0] in MODES else words)
    flags.mode = mode
    validate_flags(flags)
    return flags


def _parser() -> Parser:
    """One parser for all modes; `validate_flags` rejects flags that have no effect in a mode."""
    usage = f"ds-pretrain compare [{'|'.join(MODES)}]\n           --model NAME --world_size N [flags]"
    parser = Parser(usage=usage, formatter_class=argparse.RawDescriptionHelpFormatter, description=(
        "Compare ways to run a model on given GPUs: memory, step time, whether it fits.\n"
        "estimate: (the default) formulas, for any number of ranks, in a second or two\n"
        "simulate: the real DeepSpeed engine of one rank of each layout, on tensors without data\n"
        "measure:  real runs of the --configs on this machine, for a few steps"))
    group = parser.add_argument_group("the model")
    group.add_argument("--model", type=path_text,
                       help="preset name, transformers config.json, or a folder that holds one")
    group.add_argument("--model_overrides", type=text, help="changes to the config.json: n_layer=4,vocab_size=8000")
    for flag in DROPOUTS:
        group.add_argument(f"--{flag}", type=number(0, 0.999), help="instead of the dropout in the config.json")
    group.add_argument("--document_attention", action="store_true", default=None,
                       help="attention inside documents, which needs masks on GPUs")
    group.add_argument("--num_parameters", type=whole_number(1, 10**16),
                       help="instead of --model: compare only the model states, as in the ZeRO paper")
    _add_machines(parser.add_argument_group("the machines"))
    _add_layouts(parser.add_argument_group("the layouts (each flag takes several values)"))
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
    group.add_argument("--unit", choices=UNITS, help="unit of the table (default: GiB; with --num_parameters GB)")
    group.add_argument("--all", "--all_layouts", action="store_true", dest="all_layouts",
                       help="show a table of all layouts, with the reasons of those that are too large or impossible, "
                            "instead of the ten best distinct choices")
    group.add_argument("--all_micro_batches", action="store_true",
                       help="one row per micro-batch size, instead of only the best size")
    for flag, about in (("json", "write all results as JSON"), ("csv", "write the table as CSV")):
        group.add_argument(f"--{flag}", nargs="?", const="-", type=path_text, metavar="FILE",
                           help=f"{about} (without FILE: to stdout, instead of the table)")
    group.add_argument("--plot", type=path_text, metavar="FILE",
                       help="write a bar chart of the memory, as .html")
    group.add_argument("--write", type=path_text, metavar="FILE",
                       help="write the recommended layout as a DeepSpeed JSON")
    return parser


def _add_machines(group: Any) -> None:
    add_machines(group)
    for flag, about in (("host_memory_gib", "host memory of a node, GiB"), ("nvme_gb", "local disk of a node, GB"),
                        ("nvme_gbps", "rate of the local disk, GB/s"),
                        ("network_gbps", "network per GPU, gigabytes a second in one direction: 12.5 for 100 Gbit/s")):
        group.add_argument(f"--{flag}", type=number(0, 1e9, above=flag.endswith("gbps")), help=about)
    group.add_argument("--margin", type=number(0, 0.99), default=DEFAULT_MARGIN,
                       help=f"fraction of a GPU's memory that is kept free of tensors (default: {DEFAULT_MARGIN})")


def _add_layouts(group: Any) -> None:
    group.add_argument("--configs", nargs="+", type=path_text, metavar="JSON",
                       help="compare these DeepSpeed JSONs only")
    count = whole_number(1, _MAX_SIZE)
    for flag, (_, kind, choices, about) in _AXES.items():
        low = 0 if flag in ("zero_stage", "activation_checkpoint_interval") else 1
        of_type = whole_number(low, _MAX_SIZE) if kind is int else str
        group.add_argument(f"--{flag}", nargs="+", type=of_type, choices=choices, help=about)
    for flag, about in (("global_batch_size", f"samples per step (default: {SAMPLES_PER_RANK} per GPU)"),
                        ("gradient_accumulation_steps", "micro-batches per step")):
        group.add_argument(f"--{flag}", type=count, help=about)


def validate_flags(flags: argparse.Namespace) -> None:
    """Raise ConfigError for flags that are missing, that exclude one another, or that would have no effect."""
    if flags.model is None and flags.num_parameters is None and flags.calibrate:
        pass  # the model is the run's
    elif (flags.model is None) == (flags.num_parameters is None):
        raise ConfigError("--model / --num_parameters", expected="one of the two",
                          found="neither" if flags.model is None else "both")
    for name in ("model_overrides", *DROPOUTS):
        if getattr(flags, name) is not None and flags.model is None:
            raise ConfigError(f"--{name}", problem="it needs --model, which is missing")
    if flags.calibrate and flags.kernel_efficiency is not None:
        raise ConfigError("--kernel_efficiency", problem="--calibrate fits this value", remedy="Leave one of them out")
    if flags.configs:
        _reject(flags, [name for name in _AXES if name not in ("micro_batch_size", "seq_length")], "with --configs")
        _reject(flags, ["global_batch_size", "num_parameters"], "with --configs")
        for name in ("micro_batch_size", "seq_length"):
            if len(getattr(flags, name) or ()) > 1:
                raise ConfigError(f"--{name}", problem="with --configs it takes only one value")
    elif flags.mode == "measure":
        raise ConfigError("measure", problem="--configs is missing, which names the DeepSpeed JSONs to run",
                          remedy="example: --configs zero2_bf16 zero3_bf16")
    if flags.mode != "estimate":
        _reject(flags, ["find", "num_parameters", "plot", "write", "csv", "calibrate"], f"in the mode {flags.mode}")
    if flags.mode != "measure":
        _reject(flags, ["steps", "nvme_path"], f"in the mode {flags.mode}")
    if flags.find:
        _reject(flags, ["plot", "write", "csv", "calibrate"], "with --find")
    if flags.find == "max_seq":
        _reject(flags, ["seq_length"], "with --find max_seq")
    if flags.find == "max_micro_batch":
        _reject(flags, ["micro_batch_size", "global_batch_size"], "with --find max_micro_batch")
    if flags.plot is not None:
        check_plot(flags.plot)
    for name in ("json", "csv", "plot", "write"):
        if getattr(flags, name) not in (None, "-"):
            check_file(Path(getattr(flags, name)), f"--{name}")
    if flags.num_parameters is not None:
        _reject(flags, ["micro_batch_size", "seq_length", "global_batch_size", "activation_checkpoint_interval",
                        "recompute", "gradient_accumulation_steps", "sequence_parallel", "expert_parallel", "write",
                        "document_attention", "calibrate"],
                "with --num_parameters")


def _reject(flags: argparse.Namespace, names: list[str], when: str) -> None:
    """Raise ConfigError if one of the named flags was given."""
    for name in names:
        if getattr(flags, name) is not None:
            raise ConfigError(f"--{name}", problem=f"it has no effect {when}", remedy="Leave it out")


def axes_of(flags: argparse.Namespace, seq_length: int) -> Axes:
    """Return the values of the layout flags. `seq_length` is the default for --seq_length."""
    given: dict[str, Any] = {field: tuple(getattr(flags, flag)) for flag, (field, *_) in _AXES.items()
                             if getattr(flags, flag)}
    given.setdefault("seq_lengths", (seq_length,))
    if flags.mode != "estimate":  # each layout takes seconds
        given |= {name: given.get(name, (1,)) for name in PARALLEL_SIZES}
    return Axes(**given, global_batch_size=flags.global_batch_size,
                gradient_accumulation_steps=flags.gradient_accumulation_steps)


def cluster_of(flags: argparse.Namespace, gpu: str | None) -> Cluster:
    """Return the machines that the flags describe, with a GPU by its name (see find_gpu). Raises ConfigError."""
    names = ("world_size", "nodes", "gpus_per_node", "host_memory_gib", "nvme_gb", "nvme_gbps", "network_gbps",
             "margin")
    return make_cluster(gpu=gpu, **{name: getattr(flags, name) for name in names})
