"""--what profile: where the time of a training step goes, per kind of operator and per operator, by torch.profiler."""

import re
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from tools.benchmarks.processes import BenchContext, ReportProgress, run_interleaved
from tools.benchmarks.report import BenchSection

PRODUCTS, ATTENTION, NORMS, ACTIVATIONS = "matrix products", "attention", "norms", "activations"
COPIES, LOSS, EMBEDDING, ELEMENTWISE = "copies and casts", "loss", "embedding", "other elementwise and sums"
OPTIMIZER, COLLECTIVES, HOST = "optimizer", "collectives", "Python and host"
KINDS = (PRODUCTS, ATTENTION, NORMS, ACTIVATIONS, COPIES, LOSS, EMBEDDING, ELEMENTWISE, OPTIMIZER, COLLECTIVES, HOST)
_OPTIMIZER_STEP, _TRAINING_STEP = "optimizer step", "training step"  # names of our own ranges in the profile

_PRODUCT = re.compile(r"::(mm|bmm|addmm|baddbmm|_linear_pointwise|mv|addmv)_?$")
# operators that move no data: views, allocation, and those that call other operators
_NO_DATA = re.compile(
    r"^aten::(as_strided|t|transpose|permute|view\w*|_unsafe_view|_reshape_alias|reshape\w*|flatten|unflatten|expand\w*|"
    r"select|slice|narrow|split\w*|chunk|unbind|squeeze|unsqueeze|detach\w*|alias|lift_fresh|resolve_\w+|result_type|"
    r"empty\w*|new_\w+|resize_|set_|to|item|is_nonzero|_local_scalar_dense|contiguous|clone|matmul|linear|zeros\w*|ones\w*)$")
# (kind, pattern of names of C functions of this project, of torch's operators, or of CUDA kernels)
_BY_NAME = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in (
    (COLLECTIVES, r"nccl|gloo|c10d|record_param_comms|allreduce|all_gather|reduce_scatter"),
    (PRODUCTS, r"gemm|cutlass|cublas|nvjet|splitk|wgmma"),
    (LOSS, r"nll_loss|log_softmax|cross_entropy|logit|(^|_|::)loss"),
    (ATTENTION, r"softmax|scaled_dot|flash|fmha|attention|rope|rotate|sdpa"),
    (NORMS, r"layer_?norm|rms_?norm|GammaBeta|^c::norm"),
    (ACTIVATIONS, r"gelu|silu|swiglu|threshold|relu|activat"),
    (OPTIMIZER, r"adam|multi_tensor|clip|lion|muon|sum_squares|find_not_finite|scale_to_float"),
    (EMBEDDING, r"embedding|index_(add|select|put)|^aten::index"),
    (COPIES, r"copy|^aten::(cat|stack|fill_|zero_|_to_copy)$|memcpy|memset|CatArray|transpose|cast|FillFunctor"),
))
# (kind of elementwise operators that are called by the function of this name, pattern)
_BY_CALLER = tuple((kind, re.compile(pattern)) for kind, pattern in (
    (NORMS, r"(?i)layer_norm|rms_?norm"), (ATTENTION, r"Attention|scaled_dot_product"),
    (LOSS, r"CrossEntropy|cross_entropy"), (ACTIVATIONS, r"ActivatedLinear|silu|gelu")))

PROJECT = "this project"


def kind_of(name: str, callers: Sequence[str], shapes: Sequence[Sequence[int]], vocab_size: int) -> str:
    """Return the kind of an operator.

    Args:
        callers: names of the operators and functions that call it.
        shapes: of its tensors; [] for other arguments. Elementwise operators and copies of logits count as loss.
    """
    if kind_of_kernel(name) == COLLECTIVES:
        return COLLECTIVES
    if any(caller == _OPTIMIZER_STEP or caller.startswith("Optimizer.step#") for caller in (*callers, name)):
        return OPTIMIZER
    if _PRODUCT.search(name):
        return PRODUCTS
    if not re.match(r"^(aten|c|c10d|mkldnn|prims|gloo|nccl)::|^record_param_comms", name) or _NO_DATA.match(name):
        return HOST
    kind = kind_of_kernel(name)
    if kind in (COPIES, ELEMENTWISE, ATTENTION) and any(shape and shape[-1] == vocab_size for shape in shapes):
        return LOSS
    if kind != ELEMENTWISE or name.startswith("c::"):
        return kind
    return next((found for found, pattern in _BY_CALLER if any(map(pattern.search, callers))), ELEMENTWISE)


def kind_of_kernel(name: str) -> str:
    """Return the kind that the name of an operator or of a CUDA kernel suggests."""
    return next((kind for kind, pattern in _BY_NAME if pattern.search(name)), ELEMENTWISE)


def flops(name: str, shapes: Sequence[Sequence[int]]) -> int:
    """Return the floating-point operations of a matrix product; 0 for other operators."""
    matrices = [shape for shape in shapes if len(shape) >= 2][-2:]
    if not _PRODUCT.search(name) or len(matrices) < 2:
        return 0
    left, right = matrices
    # the second matrix is [inner, columns], or a linear layer's weight [columns, inner]
    return 2 * prod(left) * (right[-1] if left[-1] == right[-2] else right[-2])


named_optimizer_step = record_function(_OPTIMIZER_STEP)
"""Decorator of a function that is one range of the profile."""


def operator_times(step: Callable[[], Any], *, vocab_size: int, cuda: bool) -> list[dict[str, Any]]:
    """Run and profile a training step. Return one row per operator and kind.

    On a CPU the times add up to the time of the step: the time of an operator does not include operators that it
    calls, and the rest is Python's. On a GPU the times are its kernels'; the rest of the step is the host's.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities, record_shapes=not cuda) as profiler:
        start = time.perf_counter()
        with record_function(_TRAINING_STEP):
            step()
        if cuda:
            torch.cuda.synchronize()
        wall_us = 1e6 * (time.perf_counter() - start)
    rows: dict[tuple[str, str], dict[str, Any]] = {}

    def add(kind: str, name: str, time_us: float, operations: int = 0) -> None:
        row = rows.setdefault((kind, name), {"kind": kind, "name": name, "calls": 0, "self_time_ms": 0.0, "flops": 0})
        row["calls"] += 1
        row["self_time_ms"] += time_us / 1e3
        row["flops"] += operations

    if cuda:
        kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA
                   and not event.is_user_annotation]
        for event in kernels:
            add(kind_of_kernel(event.name), event.name, event.time_range.elapsed_us())
        add(HOST, "the GPU waits", max(wall_us - sum(event.time_range.elapsed_us() for event in kernels), 0))
    else:
        for event in profiler.events():
            callers = _callers(event)
            if _TRAINING_STEP in (event.name, *callers):
                add(kind_of(event.name, callers, event.input_shapes, vocab_size), event.name, event.self_cpu_time_total,
                    flops(event.name, event.input_shapes))
    return list(rows.values())


def _callers(event: Any) -> list[str]:
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


def profile(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Profile the training steps of this project. Each repetition has one step; the fastest one counts."""
    results = run_interleaved([context.job(PROJECT, "project.profile")], context, report)
    steps = [answer["operators"] for answer in results.answers.get(PROJECT, [])]
    # other load on the machine has disturbed the fastest step least
    return profile_section(min(steps, key=_total_ms, default=[]), len(steps), results.failures)


def profile_section(operators: list[dict[str, Any]], repetitions: int, failures: list[str]) -> BenchSection:
    """Compute the table and the figures of one step from the result of `operator_times`."""
    total = _total_ms(operators)
    kinds = [_figures(found, total) for kind in KINDS if (found := [row for row in operators if row["kind"] == kind])]
    rows = [[each["kind"], f"{each['time_ms_per_step']:,.1f}", f"{each['fraction']:.1%}",
             f"{each['calls_per_step']:,}", f"{each['flops_per_step'] / each['time_ms_per_step'] / 1e9:.2f} TFLOP/s"
             if each["flops_per_step"] else ""] for each in kinds]
    notes = [f"The fastest of {repetitions} profiled steps; the profiler adds some microseconds to each call. The time "
             "of an operator does not include operators that it calls.",
             "--json lists the operators. Copies and elementwise operators of logits count as loss; clipping and "
             "weight casts of the update count as optimizer. Fused attention includes its matrix products."]
    listed = [{"name": row["name"], **_figures([row], total)} for row in operators]
    return BenchSection("profile", "Time of a training step by operator", ["", "ms", "fraction", "calls", "rate"],
                        [*rows, ["sum", f"{total:,.1f}", "", "", ""]] if rows else [], notes, failures,
                        {"operators": sorted(listed, key=lambda row: -row["time_ms_per_step"]),
                         "step_time_ms": {PROJECT: total}, "kinds": {PROJECT: kinds}})


def _total_ms(operators: list[dict[str, Any]]) -> float:
    return float(sum(row["self_time_ms"] for row in operators))


def _figures(operators: list[dict[str, Any]], step_ms: float) -> dict[str, Any]:
    """Return the sums of operators of one kind in one step."""
    time_ms = _total_ms(operators)
    return {"kind": operators[0]["kind"], "time_ms_per_step": time_ms, "fraction": time_ms / step_ms,
            "calls_per_step": sum(row["calls"] for row in operators),
            "flops_per_step": sum(row["flops"] for row in operators)}
