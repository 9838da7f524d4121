"""Profiles of training steps: the kinds of operators, their own times and floating-point operations."""

import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from tools.benchmarks.profile import (
    ACTIVATIONS,
    ATTENTION,
    COLLECTIVES,
    COPIES,
    ELEMENTWISE,
    EMBEDDING,
    HOST,
    LOSS,
    NORMS,
    OPTIMIZER,
    PRODUCTS,
    flops,
    kind_of,
    kind_of_kernel,
    named_optimizer_step,
    operator_times,
    profile_section,
)

VOCAB = 50


def test_a_step_is_divided_into_operators_whose_times_add_up() -> None:
    x, weight = torch.randn(8, 16), torch.randn(16, VOCAB, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    update = named_optimizer_step(lambda: (torch.nn.utils.clip_grad_norm_([weight], 1.0), optimizer.step()))
    seconds = []

    def step() -> None:
        start = time.perf_counter()
        F.layer_norm(x, (16,)).bfloat16()
        F.cross_entropy(x @ weight, torch.zeros(8, dtype=torch.int64)).backward()
        update()
        time.sleep(0.02)
        seconds.append(time.perf_counter() - start)

    rows = operator_times(step, vocab_size=VOCAB, cuda=False)
    by_name = {(row["kind"], row["name"]): row for row in rows}
    # one forward product, and one for the weight's gradient
    product = by_name[PRODUCTS, "aten::mm"]
    assert (product["calls"], product["flops"]) == (2, 2 * 2 * 8 * 16 * VOCAB)
    assert {(LOSS, "aten::_log_softmax"), (COPIES, "aten::copy_")} <= by_name.keys()
    assert by_name[NORMS, "aten::native_layer_norm"]["calls"] == 1
    assert (OPTIMIZER, "aten::_fused_adamw_") in by_name
    assert (OPTIMIZER, "aten::linalg_vector_norm") in by_name
    times_ms = {kind: sum(row["self_time_ms"] for row in rows if row["kind"] == kind) for kind in (HOST, PRODUCTS)}
    assert times_ms[HOST] >= 20  # the process slept
    assert sum(row["self_time_ms"] for row in rows) > 0.999 * 1e3 * sum(seconds)  # with the range of the step itself
    assert all(row["self_time_ms"] >= 0 for row in rows)


@pytest.mark.parametrize(("name", "callers", "shapes", "kind"), [
    ("aten::mul", (), [[4, 8], [4, 8]], ELEMENTWISE),
    ("aten::mul", ("aten::rms_norm",), [[4, 8], [4, 8]], NORMS),
    ("aten::matmul", (), [[4, 8], [8, 8]], HOST),  # it calls aten::mm
    ("c::gelu_tanh", (), [[4, 8], [4, 8]], ACTIVATIONS),
    ("c::column_sum", ("_ActivatedLinear",), [[4, 8]], ELEMENTWISE),
    ("aten::amax", ("_CausalAttention",), [[4, 8]], ATTENTION),
    ("aten::copy_", ("_CausalAttention",), [[4, 8], [4, 8]], COPIES),
    ("aten::copy_", (), [[4, VOCAB], [4, VOCAB]], LOSS),
    ("aten::mm", (), [[4, 8], [8, VOCAB]], PRODUCTS),
    ("aten::_softmax", (), [[4, 8]], ATTENTION),
    ("aten::_softmax", (), [[4, VOCAB]], LOSS),
    ("aten::embedding", (), [[VOCAB, 8], [4]], EMBEDDING),
    ("aten::copy_", ("optimizer step",), [[4]], OPTIMIZER),
    ("c10d::allreduce_", ("optimizer step",), [[4]], COLLECTIVES),
    ("aten::view", (), [[4]], HOST),
    ("MmBackward0", (), [[4]], HOST),
    ("c::norm", (), [[4, 8]], NORMS),
    ("c::norm_backward", (), [[4, 8]], NORMS),
    ("c::silu_gated_backward", (), [[4, 8]], ACTIVATIONS),
])
def test_kinds_of_operators(name: str, callers: tuple[str, ...], shapes: list[list[int]], kind: str) -> None:
    assert kind_of(name, callers, shapes, VOCAB) == kind


@pytest.mark.parametrize(("name", "kind"), [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", COLLECTIVES),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", PRODUCTS),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", PRODUCTS),
    ("void pytorch_flash::flash_fwd_kernel<...>", ATTENTION),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<...>", NORMS),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdamMathFunctor...>", OPTIMIZER),
    ("Memcpy DtoD (Device -> Device)", COPIES),
    ("triton_poi_fused_add_mul_0", ELEMENTWISE)])
def test_kinds_of_cuda_kernels(name: str, kind: str) -> None:
    assert kind_of_kernel(name) == kind


def test_operations_of_products_and_the_sums_of_a_kind() -> None:
    assert flops("aten::baddbmm", [[1], [3, 4, 8], [3, 8, 5]]) == 2 * 3 * 4 * 8 * 5
    assert flops("mkldnn::_linear_pointwise", [[2, 4, 8], [5, 8], [5]]) == 2 * 2 * 4 * 8 * 5
    assert flops("aten::add", [[4, 8], [4, 8]]) == 0
    step = [{"kind": kind, "name": name, "self_time_ms": time_ms, "calls": 2, "flops": 10**12 * (kind == PRODUCTS)}
            for kind, name, time_ms in ((HOST, "a", 398), (PRODUCTS, "aten::mm", 600), (PRODUCTS, "aten::bmm", 2))]
    section = profile_section(step, 3, [])
    assert section.rows == [["matrix products", "602.0", "60.2%", "4", "3.32 TFLOP/s"],
                            ["Python and host", "398.0", "39.8%", "2", ""], ["sum", "1,000.0", "", "", ""]]
    assert [row["name"] for row in section.data["operators"]] == ["aten::mm", "a", "aten::bmm"]
