"""Matrix products in FP8: the flag, what it excludes, and notes about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pretrain.config.flags.flag import Group
from pretrain.extension import Extension

if TYPE_CHECKING:
    from pretrain.config.flags.arguments import RunArguments
    from pretrain.config.layout_rules import Rule
    from pretrain.config.plan import Plan

GROUP = Group("speed, memory and debugging")
FLAG = "--fp8"
TORCH_SINCE = "2.11"
_CAPABILITY = 8.9
_MULTIPLE = 16  # torch._scaled_mm multiplies matrices whose sizes are multiples of it


@dataclass(frozen=True)
class Fp8:
    """The recipe of torchao."""

    fp8: str | None = GROUP.flag(
        None, "multiply the matrices of linear layers in FP8, with a scale for each tensor, or for each row and column "
        "(torchao); head, optimizer and checkpoints do not change. Needs compute capability 8.9; emulated on CPUs",
        choices=("tensorwise", "rowwise"), metavar="RECIPE", unset="bf16 products", repeats=True)


def _precision(args: "RunArguments") -> str:
    return f"products of linear layers in FP8 ({args.of(Fp8).fp8})"


def _rules(run: "Plan") -> "Iterator[Rule]":
    """Devices, precisions, models and sizes without products in FP8."""
    from packaging.version import Version

    from pretrain.config.layout_rules import TENSOR, Rule

    args, layout, model = run.args, run.layout, run.model
    yield Rule(layout.precision != "bf16", FLAG, "bf16, which the rest of the model has",
               'set "bf16": {"enabled": true} in the JSON, or leave --fp8 out', found=f"a run in {layout.precision}")
    yield Rule(run.device.kind == "cuda" and run.device.capability < _CAPABILITY, FLAG,
               problem="this GPU has no products in FP8: they need compute capability 8.9 (L4, L40S, H100 or later)",
               remedy="leave --fp8 out")
    yield Rule(model.num_experts, FLAG, "a model without", "the products of experts are grouped ones, which remain in "
               "bf16; leave --fp8 out", found="a model with experts")
    tensor = layout.tensor_parallel_size
    yield Rule(tensor > 1, FLAG, "1", "each rank would scale its part of a matrix, so that losses would depend on the "
               "number of ranks; leave --fp8 out", found=f'"{TENSOR}": {tensor}')
    yield Rule(args.plain_operators, FLAG, problem="--plain_operators computes linear layers by torch's own operators",
               remedy="use one of the two flags")
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    sizes = {"hidden size": model.hidden_size, "inner size of the MLP": model.intermediate_size,
             "size of queries, keys and values": qkv, "size of all heads": model.num_heads * model.head_size}
    lengths = {stage[1] for stage in run.seq_lengths.stages} or {args.seq_length}
    parts = layout.sequence_parallel_size * layout.mlp_tiles
    sizes |= {f"micro-batch of {layout.micro_batch_size} x {length} tokens" + (f" / {parts} parts" * (parts > 1)):
              layout.micro_batch_size * length // parts for length in lengths}
    for name, size in sizes.items():
        yield Rule(size % _MULTIPLE, FLAG, problem=f"the {name} is {size}, and sizes of products in FP8 are multiples "
                   f"of {_MULTIPLE}", remedy="change the size, or leave --fp8 out")
    yield Rule(find_spec("torchao") is None, FLAG, problem="it needs the package torchao, which is not installed",
               remedy="pip install 'ds-pretrain[fp8]'")
    torch = version("torch")
    yield Rule(Version(torch) < Version(TORCH_SINCE), FLAG, problem=f"it needs torch {TORCH_SINCE} or later, as "
               f"torchao does; this is torch {torch}", remedy="leave --fp8 out")


def _notes(plan: "Plan") -> Iterator[str]:
    if plan.device.kind == "cpu":
        yield "--fp8 on a CPU is emulated: slower than bf16, for tests of its losses"
    elif not plan.args.compile_blocks:
        yield "--fp8 without --compile_blocks: each cast is several kernels, which can take longer than FP8 products " \
              "save"


EXTENSION = Extension(
    "fp8", "Multiplies the matrices of linear layers in FP8, with the casts and scales of torchao.", settings=Fp8,
    rules=_rules, notes=_notes, precision=_precision, model="products:multiply_in_fp8",
    operator_memory="memory:Fp8Memory")
