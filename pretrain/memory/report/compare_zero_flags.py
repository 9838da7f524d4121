"""The flags of tools/compare_zero.py."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.cli import Parser, number, place, text, whole_number
from pretrain.errors import ConfigError
from pretrain.memory.hardware import DEFAULT_MARGIN, GB, GPUS, Cluster, make_cluster
from pretrain.memory.report.plot import check_plot
from pretrain.memory.search.axes import OFFLOADS, Axes
from pretrain.memory.search.candidates import SAMPLES_PER_RANK
from pretrain.memory.search.largest_fit import FIND_TARGETS
from pretrain.memory.sizes import UNITS
from pretrain.memory.step_time.run_cost import STORAGE_RATE
from pretrain.memory.step_time.time_model import KERNEL_EFFICIENCY
from pretrain.paths import check_file

_MOST = 10**8
MODES = ("estimate", "simulate", "measure")
DEFAULT_SEQ_LENGTH = 1024  # that of train.py
# flag -> (field of Axes, type, choices)
_AXES: dict[str, tuple[str, type, tuple[Any, ...] | None, str]] = {
    "zero_stage": ("zero_stages", int, (0, 1, 2, 3), "ZeRO stages"),
    "offload": ("offloads", str, tuple(OFFLOADS), "what lies where"),
    "pipeline_stages": ("pipeline_stages", int, None, "pipeline stages (default: powers of two)"),
    "tensor_parallel": ("tensor_parallel_sizes", int, None, "ranks that share each matrix"),
    "sequence_parallel": ("sequence_parallel_sizes", int, None, "ranks that share each sequence"),
    "expert_parallel": ("expert_parallel_sizes", int, None, "ranks that share the experts"),
    "precision": ("precisions", str, ("bf16", "fp16", "fp32"), "precisions"),
    "grad_accum_dtype": ("grad_accum_dtypes", str, ("bf16", "fp16", "fp32"), "what gradients are accumulated in"),
    "activation_checkpoint_interval": ("activation_checkpoint_intervals", int, None,
                                       "blocks of a recomputed group, 0: none (default: 0 1)"),
    "micro_batch_size": ("micro_batch_sizes", int, None, "samples (default: the best power of two)"),
    "seq_length": ("seq_lengths", int, None, f"tokens (default: {DEFAULT_SEQ_LENGTH}, or the model's positions)"),
}


def parse_flags(words: list[str]) -> argparse.Namespace:
    """The mode, which comes first or not at all, and the flags, checked. Raises ConfigError."""
    mode = words[0] if words and words[0] in MODES else MODES[0]
    flags = _parser().parse_args(words[1:] if words and words[0] in MODES else words)
    flags.mode = mode
    check_flags(flags)
    return flags


def _parser() -> Parser:
    """All modes share their flags; `check_flags` refuses what has no effect."""
    usage = f"tools/compare_zero.py [{'|'.join(MODES)}]\n           --model NAME --world_size N [flags]"
    parser = Parser(usage=usage, formatter_class=argparse.RawDescriptionHelpFormatter, description=(
        "Compare ways to run a model on given GPUs: memory, step time, whether it fits.\n"
        "estimate: (the default) closed forms, any number of ranks, in a second or two\n"
        "simulate: real DeepSpeed engines, one rank of N at a time, in this host's memory\n"
        "measure:  real runs of the --configs on this machine, a few steps each"))
    group = parser.add_argument_group("the model")
    group.add_argument("--model", type=place, help="preset name, transformers config.json, or a folder that holds one")
    group.add_argument("--model_overrides", type=text, help="changes to the config.json: n_layer=4,vocab_size=8000")
    group.add_argument("--num_parameters", type=whole_number(1, 10**16),
                       help="instead of --model: model states alone, as in the ZeRO paper")
    group = parser.add_argument_group("the machines")
    for flag, about in (("world_size", "GPUs"), ("nodes", "machines"), ("gpus_per_node", "GPUs a machine (8)")):
        group.add_argument(f"--{flag}", type=whole_number(1, 10**7), help=about)
    group.add_argument("--gpu", type=text, help=f"{', '.join(GPUS)}, or GiB (default: this machine's, or h100)")
    for flag, about in (("host_memory_gib", "host memory of a node, GiB"), ("nvme_gb", "local disk of a node, GB"),
                        ("nvme_gbps", "its rate, GB/s"), ("network_gbps", "network of a GPU, GB/s one way")):
        group.add_argument(f"--{flag}", type=number(0, 1e9, above=flag.endswith("gbps")), help=about)
    group.add_argument("--margin", type=number(0, 0.99), default=DEFAULT_MARGIN,
                       help=f"share of a GPU's memory that no tensor may take ({DEFAULT_MARGIN})")
    _add_layouts(parser.add_argument_group("the layouts (several values each)"))
    group = parser.add_argument_group("what is asked")
    group.add_argument("--find", choices=FIND_TARGETS, help="the largest that fits each layout")
    group.add_argument("--tokens", type=number(1, 1e20), help="of the run, for its cost (default: 20 a parameter)")
    group.add_argument("--mfu", type=number(1e-4, 1), help="for the cost, instead of the predicted one")
    group.add_argument("--kernel_efficiency", type=number(1e-4, 1), default=KERNEL_EFFICIENCY,
                       help=f"share of the peak rate while nothing waits ({KERNEL_EFFICIENCY})")
    group.add_argument("--storage_gbps", type=number(1e-3, 1e9), default=STORAGE_RATE / GB,
                       help=f"rate at which a node writes checkpoints, GB/s ({STORAGE_RATE / GB:g})")
    group.add_argument("--steps", type=whole_number(2, 10**4), help="measure: timed steps of each run (4)")
    group.add_argument("--nvme_path", type=place,
                       help="measure: a folder on a local disk, for JSONs that leave it \"auto\"")
    group = parser.add_argument_group("output")
    group.add_argument("--unit", choices=UNITS, help="of the table (GiB; GB with --num_parameters)")
    group.add_argument("--all_micro_batches", action="store_true", help="a row of each micro-batch, not of the best")
    for flag, about in (("json", "everything, as JSON"), ("csv", "the table, as CSV")):
        group.add_argument(f"--{flag}", nargs="?", const="-", type=place, metavar="FILE",
                           help=f"{about} (no FILE: instead of the table)")
    group.add_argument("--plot", type=place, metavar="FILE", help="stacked bars as .png or .html")
    group.add_argument("--write", type=place, metavar="FILE", help="the recommended layout, as a DeepSpeed JSON")
    return parser


def _add_layouts(group: Any) -> None:
    group.add_argument("--configs", nargs="+", type=place, metavar="JSON", help="these DeepSpeed JSONs, and no others")
    count = whole_number(1, _MOST)
    for flag, (_, kind, choices, about) in _AXES.items():
        low = 0 if flag in ("zero_stage", "activation_checkpoint_interval") else 1
        of_type = whole_number(low, _MOST) if kind is int else str
        group.add_argument(f"--{flag}", nargs="+", type=of_type, choices=choices, help=about)
    for flag, about in (("global_batch_size", f"samples of a step ({SAMPLES_PER_RANK} a GPU)"),
                        ("gradient_accumulation_steps", "micro-batches of a step")):
        group.add_argument(f"--{flag}", type=count, help=about)


def check_flags(flags: argparse.Namespace) -> None:
    """Raises ConfigError for what is missing, excludes one another, or would have no effect."""
    if (flags.model is None) == (flags.num_parameters is None):
        raise ConfigError("--model / --num_parameters", expected="one of the two",
                          found="neither" if flags.model is None else "both")
    if flags.model_overrides and flags.model is None:
        raise ConfigError("--model_overrides", found="it without --model", expected="--model")
    if flags.configs:
        _refuse(flags, [name for name in _AXES if name not in ("micro_batch_size", "seq_length")], "with --configs")
        _refuse(flags, ["global_batch_size"], "with --configs")
        for name in ("micro_batch_size", "seq_length"):
            if len(getattr(flags, name) or ()) > 1:
                raise ConfigError(f"--{name}", found="several values with --configs", expected="one")
    elif flags.mode == "measure":
        raise ConfigError("measure", found="no --configs", expected="the DeepSpeed JSONs to run",
                          remedy="for example --configs ds_configs/zero*.json")
    if flags.mode != "estimate":
        _refuse(flags, ["find", "num_parameters", "plot", "write", "csv"], f"in {flags.mode}")
    if flags.mode != "measure":
        _refuse(flags, ["steps", "nvme_path"], f"in {flags.mode}")
    if flags.find:
        _refuse(flags, ["plot", "write", "csv"], "with --find")
    if flags.find == "max_seq":
        _refuse(flags, ["seq_length"], "with --find max_seq")
    if flags.find == "max_micro_batch":
        _refuse(flags, ["micro_batch_size", "global_batch_size"], "with --find max_micro_batch")
    if flags.plot is not None:
        check_plot(flags.plot)
    for name in ("json", "csv", "plot", "write"):
        if getattr(flags, name) not in (None, "-"):
            check_file(Path(getattr(flags, name)), f"--{name}")
    if flags.num_parameters is not None:
        _refuse(flags, ["micro_batch_size", "seq_length", "global_batch_size", "activation_checkpoint_interval",
                        "gradient_accumulation_steps", "sequence_parallel", "expert_parallel", "write"],
                "with --num_parameters")


def _refuse(flags: argparse.Namespace, names: list[str], when: str) -> None:
    for name in names:
        if getattr(flags, name) is not None:
            raise ConfigError(f"--{name}", found=f"it {when}", expected="no such flag here", remedy="leave it out")


def axes_of(flags: argparse.Namespace, seq_length: int) -> Axes:
    """What the flags vary; `seq_length` where they do not say."""
    given = {field: tuple(getattr(flags, flag)) for flag, (field, *_) in _AXES.items() if getattr(flags, flag)}
    given.setdefault("seq_lengths", (seq_length,))
    return Axes(**given, global_batch_size=flags.global_batch_size,
                gradient_accumulation_steps=flags.gradient_accumulation_steps)


def cluster_of(flags: argparse.Namespace) -> Cluster:
    """The machines. Raises ConfigError."""
    return make_cluster(
        gpu=flags.gpu, world_size=flags.world_size, nodes=flags.nodes, gpus_per_node=flags.gpus_per_node,
        host_memory_gib=flags.host_memory_gib, nvme_gb=flags.nvme_gb, nvme_gbps=flags.nvme_gbps,
        network_gbps=flags.network_gbps, margin=flags.margin)
