"""The flags of `ds-pretrain compare`."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.cli import Parser, number, path_text, text, whole_number
from pretrain.config.model_of_run import DROPOUTS
from pretrain.errors import ConfigError
from pretrain.memory.compare.candidates import SAMPLES_PER_RANK
from pretrain.memory.compare.combinations import OFFLOADS, RECOMPUTE_CHOICES, Axes
from pretrain.memory.footprint import DEFAULT_MARGIN, UNITS
from pretrain.memory.hardware import GPUS, Cluster, make_cluster
from pretrain.paths import check_file

_MAX_SIZE = 10**8  # largest value of a flag that is a size or a count
DEFAULT_SEQ_LENGTH = 1024  # tokens, as in train.py
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
OUTPUT_FLAGS: dict[str, dict[str, Any]] = {
    "--unit": {"choices": UNITS, "help": "unit of the table (default: GiB; with --num_parameters GB)"},
    "--all_micro_batches": {"action": "store_true",
                            "help": "one row per micro-batch size, instead of only the best size"},
    "--write": {"type": path_text, "metavar": "FILE", "help": "write the recommended layout as a DeepSpeed JSON"},
}


def parse_flags(words: list[str]) -> argparse.Namespace:
    """Parse and validate the command line. Raises ConfigError."""
    parser = Parser(description="Compare ways to run a model on given GPUs: memory, and whether it fits.")
    add_model_and_layouts(parser)
    group = parser.add_argument_group("output")
    for flag, options in OUTPUT_FLAGS.items():
        group.add_argument(flag, **options)
    flags = parser.parse_args(words)
    validate_flags(flags)
    return flags


def add_model_and_layouts(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the model, the machines and the layouts."""
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


def _add_machines(group: Any) -> None:
    for flag, about in (("world_size", "GPUs"), ("nodes", "machines"),
                        ("gpus_per_node", "GPUs per machine (default: 8)")):
        group.add_argument(f"--{flag}", type=whole_number(1, 10**7), help=about)
    group.add_argument("--gpu", type=text,
                       help=f"{', '.join(GPUS)}, or a memory size in GiB (default: this machine's GPU, or h100)")
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


def validate_flags(flags: argparse.Namespace, *, model_is_known: bool = False) -> None:
    """Raise ConfigError for flags that are missing, that exclude one another, or that would have no effect.

    Args:
        model_is_known: without --model and --num_parameters.
    """
    if (flags.model is None) == (flags.num_parameters is None) and (flags.model is not None or not model_is_known):
        raise ConfigError("--model / --num_parameters", expected="one of the two",
                          found="neither" if flags.model is None else "both")
    for name in ("model_overrides", *DROPOUTS):
        if getattr(flags, name) is not None and flags.model is None:
            raise ConfigError(f"--{name}", problem="it needs --model, which is missing")
    if flags.configs:
        reject(flags, [name for name in _AXES if name not in ("micro_batch_size", "seq_length")], "with --configs")
        reject(flags, ["global_batch_size", "num_parameters"], "with --configs")
        for name in ("micro_batch_size", "seq_length"):
            if len(getattr(flags, name) or ()) > 1:
                raise ConfigError(f"--{name}", problem="with --configs it takes only one value")
    if flags.write not in (None, "-"):
        check_file(Path(flags.write), "--write")
    if flags.num_parameters is not None:
        reject(flags, ["micro_batch_size", "seq_length", "global_batch_size", "activation_checkpoint_interval",
                       "recompute", "gradient_accumulation_steps", "sequence_parallel", "expert_parallel", "write",
                       "document_attention"], "with --num_parameters")


def reject(flags: argparse.Namespace, names: list[str], when: str) -> None:
    """Raise ConfigError if one of the named flags was given."""
    for name in names:
        if getattr(flags, name) is not None:
            raise ConfigError(f"--{name}", problem=f"it has no effect {when}", remedy="Leave it out")


def axes_of(flags: argparse.Namespace, seq_length: int) -> Axes:
    """Return the values of the layout flags. `seq_length` is the default for --seq_length."""
    given: dict[str, Any] = {field: tuple(getattr(flags, flag)) for flag, (field, *_) in _AXES.items()
                             if getattr(flags, flag)}
    given.setdefault("seq_lengths", (seq_length,))
    return Axes(**given, global_batch_size=flags.global_batch_size,
                gradient_accumulation_steps=flags.gradient_accumulation_steps)


def cluster_of(flags: argparse.Namespace, gpu: str | None) -> Cluster:
    """Return the machines that the flags describe, with a GPU by its name (see find_gpu). Raises ConfigError."""
    names = ("world_size", "nodes", "gpus_per_node", "host_memory_gib", "nvme_gb", "nvme_gbps", "network_gbps",
             "margin")
    return make_cluster(gpu=gpu, **{name: getattr(flags, name) for name in names})
