"""Settings that one feature excludes: --deterministic, --fp8.

`run_rules.check_rules` checks them.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

from pretrain.config.layout_rules import TENSOR, Rule
from pretrain.config.plan import Plan

FLAG = "--fp8"
TORCH_SINCE = "2.11"
_MULTIPLE = 16  # torch._scaled_mm multiplies matrices whose sizes are multiples of it


def determinism(run: Plan) -> Iterator[Rule]:
    """Variables and kernels with which a run on GPUs is not bit-reproducible."""
    if not run.args.deterministic or run.device.kind != "cuda":
        return
    workspace, algorithms = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_ALGO", "")
    yield Rule(workspace not in (None, ":4096:8", ":16:8"), "CUBLAS_WORKSPACE_CONFIG", ":4096:8 or :16:8",
               "with other workspaces, products of matrices are not reproducible; unset the variable", found=workspace)
    yield Rule("NVLS" in algorithms.upper() and not algorithms.startswith("^"), "NCCL_ALGO", "Ring or Tree",
               "with NVLS, the order of sums differs between runs; unset the variable", found=algorithms)
    yield Rule(run.args.compile_blocks and Version(version("torch")) < Version("2.10"), "--deterministic",
               problem="with --compile_blocks it needs torch 2.10: older versions measure which kernels are faster",
               remedy="leave one of the two flags out")


def fp8(run: Plan) -> Iterator[Rule]:
    """Devices, precisions, models and sizes without products in FP8."""
    args, layout, model = run.args, run.layout, run.model
    if args.fp8 is None:
        return
    yield Rule(layout.precision != "bf16", FLAG, "bf16, which the rest of the model has",
               'set "bf16": {"enabled": true} in the JSON, or leave --fp8 out', found=f"a run in {layout.precision}")
    yield Rule(run.device.kind == "cuda" and not run.device.fp8, FLAG,
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
