"""Settings with which a run of --deterministic would not be bit-reproducible. `run_rules.check_rules` checks them."""

import os
from collections.abc import Iterator
from importlib.metadata import version

from packaging.version import Version

from pretrain.config.layout_rules import Rule
from pretrain.config.plan import Plan


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
